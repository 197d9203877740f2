"""Call the model's forward on its replica."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from featx.tracing.environment.raised_errors import RaisedErrors
from featx.tracing.environment.recursion import raised_recursion_limit
from featx.tracing.objects.module_parts import has_forward_hooks
from featx.tracing.replica.model_context import ModelContext


def as_given(bound: inspect.BoundArguments, count: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return bound arguments as a caller gave them: the first `count` by position, and the others by name.

    A decorator of forward may tell these apart.
    """
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        parameter = bound.signature.parameters[name]
        if parameter.kind is parameter.VAR_POSITIONAL:
            args += value
        elif parameter.kind is parameter.VAR_KEYWORD:
            kwargs.update(value)
        elif parameter.kind is not parameter.KEYWORD_ONLY and len(args) < count:
            args.append(value)
        else:
            kwargs[name] = value
    return tuple(args), kwargs


def call_model(context: ModelContext, root: nn.Module, raised: RaisedErrors, args: Any, kwargs: Any) -> Any:
    """Call what is traced, with `root` as the copy of the module that it belongs to, and return the result.

    Hooks of the root run as well: all else is computed from what they do to its inputs.

    Raises:
        KeyboardInterrupt: one has come, also where another error has replaced it.
        Signal: one was raised, also where the model has caught it.
        Untraceable: the model has caught the error of a call.
    """
    call: Callable[..., Any]
    if has_forward_hooks(root):
        call = functools.partial(type(root)._call_impl, root)
    else:
        call = root.forward if isinstance(context.traced, nn.Module) else context.traced
    with raised.in_run(), raised_recursion_limit(context.levels):
        return call(*args, **kwargs)
