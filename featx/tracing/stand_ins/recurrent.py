"""Compute the form of what a recurrent layer returns from one of its time steps.

On the meta device torch runs the cell once for each time step, at a millisecond or more a step, and each step returns
a tensor of the same form.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
# `torch.gru` and the function that `nn.GRU` calls are two objects.
_FUNCTIONS = frozenset(getattr(place, name) for place in (torch, torch._VF) for name in RECURRENT)
_COUNT_OF_ARGS = 9


def is_recurrent(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Say whether a call runs a recurrent layer over several time steps of a padded batch.

    The arguments of the call are (input, initial states, weights, has biases, layers, dropout, training, bidirectional,
    batch first). Those of a packed sequence have the batch sizes in second place.
    """
    if function not in _FUNCTIONS or kwargs or len(args) != _COUNT_OF_ARGS:
        return False
    given, weights, is_batch_first = args[0], args[2], args[-1]
    if not isinstance(weights, list) or not isinstance(is_batch_first, bool) or given.dim() != 3:
        return False
    return given.shape[_time_of(is_batch_first)] > 1


def check_states_of_packed(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Raise where the states that a recurrent layer gets with a packed sequence have lengths that it does not take.

    torch does not look in that case, and its kernels read memory that is not theirs. Such calls come about where
    featx tries other lengths of inputs.

    Raises:
        RuntimeError: the states have other lengths.
    """
    if function not in _FUNCTIONS or len(args) != _COUNT_OF_ARGS or not isinstance(args[3], (list, tuple)):
        return  # no such layer, or no packed sequence
    batch_sizes, states, layers, is_bidirectional = args[1], args[2], args[5], args[8]
    expected = (layers * (2 if is_bidirectional else 1), int(batch_sizes[0]))
    for state in (states,) if isinstance(states, torch.Tensor) else states:
        if tuple(state.shape[:2]) != expected:
            raise RuntimeError(
                f"{function.__name__} got a state of the shape {tuple(state.shape)} with a packed sequence; the first "
                f"two lengths must be {expected}"
            )


def form_of_recurrent(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
    """Return the outputs of all time steps and the last states, as one time step has them.

    Args:
        function: the torch function of the layer.
        args: its arguments, on the meta device.
    """
    given, is_batch_first = args[0], args[-1]
    time = _time_of(is_batch_first)
    step, *states = function(given.narrow(time, 0, 1), *args[1:])
    # The layer stacks the outputs of time steps, and then exchanges the first two dimensions if need be.
    outputs = step.transpose(0, time).repeat(given.shape[time], 1, 1).transpose(0, time)
    return outputs, *states


def _time_of(is_batch_first: bool) -> int:
    return 1 if is_batch_first else 0
