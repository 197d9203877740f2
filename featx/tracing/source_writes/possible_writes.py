"""Find writes to inputs, and returned inputs, in code of a measured call that did not run for the example."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn

from featx.ir.modules import modules_of
from featx.ir.torch_layers import is_torch_layer
from featx.tracing.objects.module_parts import forward_of
from featx.tracing.source_writes.argument_use import argument_use


def module_may_write_more(module: nn.Module, ran: Collection[nn.Module]) -> bool:
    """Say whether a module, or one inside it, may write an input that it did not write in the call in which `ran` ran.

    Code under conditions may, also where it wrote something: in another call it may write another input. O(modules
    inside), and code that is new.

    Args:
        module: what was called.
        ran: the modules whose `forward` ran.
    """
    return any(_may_write_more(inner, inner in ran) for inner in modules_of(module))


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


def _may_write_more(module: nn.Module, has_run: bool) -> bool:
    hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    if hooks and any(map(_hook_may_write, hooks)):  # they do not run in such a call
        return True
    if is_torch_layer(type(module)):
        return not has_run and bool(module.__dict__.get("inplace"))
    if isinstance(module, torch.jit.ScriptModule):
        return _has_conditional_writes(module)
    use = argument_use(forward_of(module), type(module))
    return bool(use.sometimes if has_run else use.lines)


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
