"""Find writes to inputs, and returned inputs, in code of a measured call that did not run for the example."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Collection, Mapping
from types import FunctionType
from typing import Any

import torch
from torch import nn

from featx.ir.modules import modules_of
from featx.ir.torch_layers import is_torch_layer
from featx.libraries import passes_arguments_on
from featx.tracing.objects.module_parts import forward_of
from featx.tracing.source_writes.argument_use import argument_use


def module_may_write_more(module: nn.Module, ran: Mapping[nn.Module, Collection[int | str]]) -> bool:
    """Say whether a module, or one inside it, may write an input that it did not write in the call in which `ran` ran.

    Code under conditions may, also where it wrote something: in another call it may write another input. An argument
    that was None is taken to be None in another call too, such as the cache of an encoder. O(modules inside), and code
    that is new.

    Args:
        module: what was called.
        ran: the modules whose `forward` ran, each with the places and names of arguments that were no plain values.
    """
    return any(_may_write_more(inner, ran.get(inner)) for inner in modules_of(module))


def function_may_write_more(function: Callable[..., Any]) -> bool:
    """Say whether a function may write in place what it did not write in its measured call."""
    if isinstance(function, torch.jit.ScriptFunction):
        return _has_conditional_writes(function)
    return bool(argument_use(function).sometimes)


def can_return_input(called: Any) -> bool:
    """Say whether a function, or a module or one inside it, may return an input of its own. O(modules inside).

    A `Sequential` returns its input only if each of its modules does.
    """
    if isinstance(called, nn.Sequential) and type(called).forward is nn.Sequential.forward:
        return all(map(can_return_input, called))
    if isinstance(called, nn.Module):
        return any(_forward_can_return_input(inner) for inner in modules_of(called))
    return isinstance(called, torch.jit.ScriptFunction) or argument_use(called).is_returned


def _may_write_more(module: nn.Module, given: Collection[int | str] | None) -> bool:
    """Say so of one module; `given` is None where it did not run."""
    has_run = given is not None
    hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    if hooks and any(map(_hook_may_write, hooks)):  # they do not run in such a call
        return True
    if is_torch_layer(type(module)):
        return not has_run and bool(module.__dict__.get("inplace"))
    if isinstance(module, torch.jit.ScriptModule):
        return _has_conditional_writes(module)
    forward = forward_of(module)
    use = argument_use(forward, type(module), absent=_absent(module, given) if has_run else frozenset())
    return bool(use.sometimes if has_run else use.lines)


def _absent(module: nn.Module, given: Collection[int | str]) -> frozenset[str]:
    """Return the parameters of a forward method with None as their default that were given nothing else.

    An empty set where something around it may give it other arguments.
    """
    forward = forward_of(module)
    if not _may_be_absent(forward):
        return frozenset()
    parameters = inspect.signature(forward).parameters
    is_renamed = any(isinstance(each, str) and each not in parameters for each in given)
    if is_renamed or "forward" in module.__dict__ or module._forward_pre_hooks or not _gets_as_given(type(module)):
        return frozenset()
    return frozenset(
        name
        for place, (name, each) in enumerate(parameters.items(), start=-1)  # without self
        if each.default is None and place not in given and name not in given
    )


def _may_be_absent(forward: Callable[..., Any]) -> bool:
    """Say whether a parameter of a function has None as its default, or may have."""
    if not isinstance(forward, FunctionType):
        return True
    defaults = (*(forward.__defaults__ or ()), *(forward.__kwdefaults__ or {}).values())
    return any(each is None for each in defaults)


def _gets_as_given(kind: type[nn.Module]) -> bool:
    """Say whether a forward method gets the arguments of a call as they are given, by name at most otherwise."""
    forward: Any = kind.forward
    while hasattr(forward, "__wrapped__"):
        if not passes_arguments_on(forward):
            return False
        forward = forward.__wrapped__
    return isinstance(forward, FunctionType)


def _hook_may_write(hook: Callable[..., Any]) -> bool:
    while isinstance(hook, functools.partial):
        hook = hook.func
    return bool(argument_use(hook if inspect.isroutine(hook) else type(hook).__call__).lines)


def _forward_can_return_input(module: nn.Module) -> bool:
    kind = type(module)
    if isinstance(module, torch.jit.ScriptModule):
        return True
    return not is_torch_layer(kind) and argument_use(forward_of(module), kind).is_returned


def _has_conditional_writes(scripted: Any) -> bool:
    text = str(getattr(scripted, "inlined_graph", ""))
    return ("prim::If" in text or "prim::Loop" in text) and re.search(r"aten::\w*[a-z0-9]_\(", text) is not None
