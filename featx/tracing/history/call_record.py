"""What forward does in one call, kept to compare a second call with it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from featx.tracing.environment.autocast_state import AutocastDtypes, autocast_dtypes
from featx.tracing.objects.followed_tuple import plain_tuple


class Event(NamedTuple):
    """A call that forward has made: of torch, of a function that is one node, or of a module, by its path."""

    called: Any
    args: Any
    kwargs: Any
    result: Any
    autocast_dtypes: AutocastDtypes


class Record:
    """What the forward of one call has done, in order; it keeps all its tensors alive.

    Args:
        gradients: whether gradients are enabled around the call.
    """

    def __init__(self, *, gradients: bool = True) -> None:
        self.gradients = gradients
        self.inputs: list[torch.Tensor] = []
        self.events: list[Event] = []
        # Whether it ended in the middle, because all that was requested was there.
        self.stopped_early = False
        self.result: Any = None
        # Tensors that are one object where calls return their inputs, as they do or may do for other inputs: by the id
        # of what forward got from such a call, what it gave.
        self.returned_inputs: dict[int, torch.Tensor] = {}
        # Those that are one where a caller gives one tensor as two inputs of the same form, by the id of the second.
        self.equal_inputs: dict[int, torch.Tensor] = {}
        # What autocast did around forward.
        self.autocast_dtypes = autocast_dtypes()

    def note_input(self, tensor: torch.Tensor) -> None:
        """Add what stands for a tensor among the inputs."""
        for earlier in self.inputs:
            if earlier is not tensor and _form_of(earlier) == _form_of(tensor):
                self.equal_inputs[id(tensor)] = earlier
                break
        self.inputs.append(tensor)

    def note(self, called: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Add a call that is over."""
        keywords = _snapshot(kwargs) if kwargs else kwargs
        self.events.append(Event(called, _snapshot(args), keywords, _snapshot(result), autocast_dtypes()))

    def mark(self) -> tuple[int, int]:
        """Return what `forget` needs to take back everything from now on."""
        return len(self.events), len(self.returned_inputs)

    def forget(self, mark: tuple[int, int]) -> None:
        """Take back what was noted since `mark`."""
        events, returned = mark
        del self.events[events:]
        while len(self.returned_inputs) > returned:
            self.returned_inputs.popitem()


def _form_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device, tensor.layout, tensor.requires_grad


def _snapshot(value: Any) -> Any:
    """Return `value` with copies of the lists and dicts in it, which forward may change later."""
    value = plain_tuple(value)
    kind = type(value)
    if kind is list:
        return [_snapshot(item) for item in value]
    if kind is dict:
        return {key: _snapshot(item) for key, item in value.items()}
    if kind is tuple:
        return tuple([_snapshot(item) for item in value])
    return value
