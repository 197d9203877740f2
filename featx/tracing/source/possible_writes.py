"""Find writes to inputs, and returned inputs, in code of a measured call that did not run for the example."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn

from featx.ir.torch_layers import is_torch_layer
from featx.tracing.objects.module_tree import modules_of
from featx.tracing.source.argument_use import WritingLines, may_return_argument, writing_lines
from featx.tracing.source.frames import Line


class PossibleWrites:
    """Lines of modules and functions that may write an input and did not run. The source is read once per class."""

    def __init__(self) -> None:
        self._known: dict[Any, WritingLines] = {}

    def by_module(self, module: nn.Module, ran: Collection[nn.Module], written_at: Collection[Line | None]) -> bool:
        """Say whether a module, or one inside it, may write what it did not write in the call in which `ran` ran.

        O(modules inside), and code that is new.

        Args:
            module: what was called.
            ran: the modules whose `forward` ran.
            written_at: the lines that wrote something in place.
        """
        return any(self._by_one(inner, inner in ran, written_at) for inner in modules_of(module))

    def by_function(self, function: Callable[..., Any], written_at: Collection[Line | None]) -> bool:
        """Say the same of a function."""
        if isinstance(function, torch.jit.ScriptFunction):
            return _has_conditional_writes(function)
        return any(line not in written_at for line in self._lines_of(function, function, None).sometimes)

    def _by_one(self, module: nn.Module, has_run: bool, written_at: Collection[Line | None]) -> bool:
        hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
        if hooks and any(map(self._may_write, hooks)):  # they do not run in such a call
            return True
        kind = type(module)
        if is_torch_layer(kind):
            return not has_run and bool(module.__dict__.get("inplace"))
        if isinstance(module, torch.jit.ScriptModule):
            return _has_conditional_writes(module)
        forward = module.__dict__.get("forward", kind.forward)
        lines = self._lines_of(forward if "forward" in module.__dict__ else kind, forward, kind)
        missed = lines.sometimes if has_run else lines.sometimes | lines.always
        return any(line not in written_at for line in missed)

    def _may_write(self, hook: Callable[..., Any]) -> bool:
        while isinstance(hook, functools.partial):
            hook = hook.func
        function = hook if inspect.isroutine(hook) else type(hook).__call__
        lines = self._lines_of(function, function, None)
        return bool(lines.always or lines.sometimes)

    def _lines_of(self, key: Any, function: Callable[..., Any], kind: type | None) -> WritingLines:
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = writing_lines(function, kind)
        return known


class PossiblyReturnedInputs:
    """What may return an input, or a part of one, as far as its code tells. That is read once for each class."""

    def __init__(self) -> None:
        self._known: dict[type, bool] = {}

    def can_return_input(self, called: Any) -> bool:
        """Say whether a function, or a module or one inside it, may return an input of its own. O(modules inside)."""
        if isinstance(called, nn.Module):
            return any(self._by_class(type(inner)) for inner in modules_of(called))
        return isinstance(called, torch.jit.ScriptFunction) or may_return_argument(called)

    def _by_class(self, kind: type[nn.Module]) -> bool:
        known = self._known.get(kind)
        if known is None:
            is_of_torch = is_torch_layer(kind)
            is_scripted = issubclass(kind, torch.jit.ScriptModule)
            known = is_scripted or (not is_of_torch and may_return_argument(kind.forward, kind))
            self._known[kind] = known
        return known


def _has_conditional_writes(scripted: Any) -> bool:
    text = str(getattr(scripted, "inlined_graph", ""))
    return ("prim::If" in text or "prim::Loop" in text) and re.search(r"aten::\w*[a-z0-9]_\(", text) is not None
