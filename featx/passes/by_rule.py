"""Say what calls on tensors of the meta device give, where that is known without a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from featx.errors import InputError
from featx.passes.meta_execution import replaced
from featx.tracing.stand_ins.known_results import KnownResults, key_of_call
from featx.tracing.stand_ins.module_shapes import output_of
from featx.tracing.stand_ins.recurrent import RECURRENT, form_of_recurrent, is_recurrent
from featx.tree import tensors_in, tree_leaves


def refuse_autocast(name: str) -> None:
    """Raise where autocast is on, for a call of `name`.

    Raises:
        InputError: it is.
    """
    if torch._C._is_any_autocast_enabled():
        raise InputError(
            f"{name} runs under autocast, which does not support tensors on the meta device; pass real tensors, or a "
            "fake_mode"
        )


def known_output(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what `module(*args)` has as its form, or None where it must run to know."""
    is_watched = module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__
    if is_watched or not all(_has_no_values(value) for value in args):
        return None
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        result = output_of(module, args, kwargs)
        if result is None or not torch.is_grad_enabled():
            return result
        needs = any(tensor.requires_grad for tensor in (*args, *module.parameters()))
        if isinstance(result, tuple):
            return tuple([_tracked(value, args, needs) for value in result])
        return _tracked(result, args, needs)


class ByRule(TorchFunctionMode):
    """Answers calls of torch functions on meta tensors as it has answered equal ones.

    `stand_in` gives the tensor on the meta device that stands for a real one, for functions that would not take both.
    """

    def __init__(self, stand_in: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._stand_in = stand_in
        self._results = KnownResults()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name: str = getattr(func, "__name__", str(func))
        is_cast = torch._C._is_any_autocast_enabled() and name != "__get__"
        if is_cast and any(map(_has_no_values, tree_leaves((args, kwargs)))):
            refuse_autocast(name)
        if name.partition(".")[0] in RECURRENT:  # which compare the devices of their arguments before any operator runs
            return self._recurrent(func, args, kwargs)
        first = args[0] if args else None
        if isinstance(first, (list, tuple)) and first:
            first = first[0]
        if _has_no_values(first) or (args and _has_no_values(args[-1])):
            inputs = tensors_in((args, kwargs))
            key = key_of_call(func, args, kwargs)
            with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
                result = None if key is None else self._results.get(key)
            return self._results.run(key, lambda: func(*args, **kwargs), inputs) if result is None else result
        return func(*args, **kwargs)

    def _recurrent(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not any(map(_has_no_values, tree_leaves((args, kwargs)))):
            return func(*args, **kwargs)
        needs = torch.is_grad_enabled() and _needs_gradient((args, kwargs))
        with torch._C.DisableTorchFunction():
            args_there, kwargs_there = replaced(args, self._stand_in), replaced(kwargs, self._stand_in)
            if is_recurrent(func, args_there, kwargs_there):
                results = form_of_recurrent(func, args_there)
            else:
                results = func(*args_there, **kwargs_there)
            with torch._C._DisableTorchDispatch():
                return tuple([_tracked(value, args, needs) for value in results])


def _has_no_values(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_meta


def _needs_gradient(values: Any) -> bool:
    return any(leaf.requires_grad for leaf in tensors_in(values))


def _tracked(result: Any, args: tuple[Any, ...], needs_gradient: bool) -> Any:
    """Return the result of a rule as a non-leaf of the autograd graph, if gradients are recorded."""
    if not needs_gradient or result is None or result.requires_grad or not torch.is_grad_enabled():
        return result
    if any(result is value for value in args) or not result.is_floating_point():
        return result
    return result.requires_grad_().clone()
