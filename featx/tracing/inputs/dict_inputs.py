"""Leave out of dicts among the inputs what forward never reads, such as the paths of images and labels in a batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from featx.tracing.inputs.model_call import as_given
from featx.tracing.objects.module_parts import has_forward_hooks
from featx.tracing.source_uses.key_use import keys_read
from featx.tree import items_at


def keys_read_by(traced: nn.Module | Callable[..., Any], parameter: str) -> tuple[str, ...] | None:
    """Return the keys that a model or function reads of a dict that it is given as `parameter`; None if unknown."""
    if isinstance(traced, nn.Module) and has_forward_hooks(traced):
        return None
    function = traced.forward if isinstance(traced, nn.Module) else traced
    function = function.__func__ if isinstance(function, MethodType) else function
    return keys_read(function, parameter) if isinstance(function, FunctionType) else None


def without_unread_items(
    traced: nn.Module | Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Return the inputs with those items alone of their dicts that a model or function reads, where that is known."""
    if not any(type(value) is dict for value in (*args, *kwargs.values())):
        return args, kwargs
    try:
        bound = inspect.signature(traced.forward if isinstance(traced, nn.Module) else traced).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return args, kwargs  # what does not fit is refused later
    for name, value in bound.arguments.items():
        keys = keys_read_by(traced, name) if type(value) is dict else None
        if keys is not None:
            bound.arguments[name] = items_at(value, keys)
    return as_given(bound, len(args))
