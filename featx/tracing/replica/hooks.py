"""Find what hooks of a model may have stored in an earlier call.

Hooks of modules that are kept whole do not run in a trace. A tensor that such a hook stores, and that forward then
reads, would be that of the last call, and a constant of the graph. So the trace starts again, and looks into the
modules that have hooks.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Collection, Iterable, Iterator
from contextvars import ContextVar
from typing import Any, NoReturn

import torch
from torch import nn

from featx.ir.torch_layers import is_of_torch
from featx.libraries import is_collecting_hook
from featx.rebuilding import NO_VALUE, contents_of_cell
from featx.tracing.objects.containers import containers_in
from featx.tracing.objects.module_parts import forward_of
from featx.tracing.signals import NeedsHooks, Untraceable
from featx.tracing.source.attributes import names_changed_in, names_read_in

STORED_BY_HOOK = (
    "forward reads what a forward hook stores, and hooks of modules that are kept whole do not run during a trace,"
)


class ModelHooks:
    """The forward hooks of a model, and what they may keep and change.

    Args:
        paths: the paths of the modules that have hooks.
        roots: the model and its replica.

    Attributes:
        are_run: whether modules that have hooks are looked into, so that the hooks run.
    """

    def __init__(self, paths: Collection[str], *roots: nn.Module) -> None:
        self._paths = paths
        self._roots = roots
        self.are_run = False

    def refuse_stored(self, what: str = "") -> NoReturn:
        """Raise where forward reads what a hook of a module that is kept whole stores; `what` says more."""
        if not self.are_run:
            raise NeedsHooks
        raise Untraceable(f"{STORED_BY_HOOK} {what}".rstrip())

    def keep(self, tensor: torch.Tensor) -> bool:
        """Say whether a hook may have stored a tensor, which no module has registered."""
        return bool(self._paths) and id(tensor) in self._kept

    def check_foreign(self) -> None:
        """Ask for hooks to run where forward uses a tensor of no module: a hook may have put it where nobody looks."""
        if not self.are_run and any(map(_may_store, self._hooked)):
            raise NeedsHooks

    @functools.cached_property
    def _hooked(self) -> list[nn.Module]:
        return [self._roots[-1].get_submodule(path) for path in self._paths]

    def check_read(self, modules: Iterable[nn.Module], paths: Iterable[str]) -> None:
        """Raise where forward of one of `modules` may read what hooks change, of modules at `paths` or inside these."""
        changed = self._names_changed(paths) if self._paths else frozenset[str]()
        for module in modules if changed else ():
            read = changed & names_read_in(forward_of(module), type(module))
            if read:
                self.refuse_stored(f"perhaps in '{min(read)}',")

    def _names_changed(self, paths: Iterable[str]) -> frozenset[str]:
        inside = [path for path in self._paths if any(f"{path}.".startswith(f"{each}.") for each in paths)]
        modules = map(self._roots[-1].get_submodule, inside)
        return frozenset(name for module in modules for hook in _hooks_of(module) for name in _names_changed_by(hook))

    @functools.cached_property
    def _kept(self) -> set[int]:
        return _tensors_kept(root.get_submodule(path) for root in self._roots for path in self._paths)


def _tensors_kept(modules: Iterable[nn.Module]) -> set[int]:
    """Return the ids of the tensors in whatever the forward hooks of `modules` have hold of, but for registered ones.

    That is the attributes of the module, of the hook's own object, and what its code names outside itself, with the
    lists, dicts and plain objects in those. O(size of them).
    """
    values: list[Any] = []
    for module in modules:
        values += [module, *(value for hook in _hooks_of(module) for value in _held_by(hook))]
    values += [value.__dict__ for value in values if isinstance(value, nn.Module)]
    values += [value.get(None) for value in values if isinstance(value, ContextVar)]
    # The first level of attributes as they are, whatever their number.
    level = [*values, *(item for value in values if isinstance(value, dict) for item in value.values())]
    found = {id(value) for value in level if isinstance(value, torch.Tensor)}
    for container in containers_in(level):
        items = container.values() if isinstance(container, dict) else container
        found.update(id(item) for item in items if isinstance(item, torch.Tensor))
    registered = (module._parameters | module._buffers for module in values if isinstance(module, nn.Module))
    return found - {id(tensor) for tensors in registered for tensor in tensors.values()}


def _hooks_of(module: nn.Module) -> tuple[Any, ...]:
    return *module._forward_hooks.values(), *module._forward_pre_hooks.values()


def _may_store(module: nn.Module) -> bool:
    """Say whether a hook of a module may store something elsewhere; those of torch set attributes of the module."""
    hooks = [hook for hook in _hooks_of(module) if not is_collecting_hook(hook)]
    return not all(map(is_of_torch, hooks))


def _names_changed_by(hook: Any) -> frozenset[str]:
    while isinstance(hook, functools.partial):
        hook = hook.func
    function = getattr(
        hook, "__func__", hook if inspect.isfunction(hook) else inspect.getattr_static(type(hook), "__call__", None)
    )
    owner = getattr(hook, "__self__", hook)
    return names_changed_in(inspect.unwrap(function), type(owner)) if inspect.isfunction(function) else frozenset()


def _held_by(hook: Any) -> Iterator[Any]:
    if isinstance(hook, functools.partial):
        yield from (*hook.args, *hook.keywords.values())
        yield from _held_by(hook.func)
        return
    yield getattr(hook, "__self__", hook)
    function = inspect.unwrap(getattr(hook, "__func__", hook))
    code = getattr(function, "__code__", None)
    if code is None:
        return
    yield from (function.__defaults__ or ())
    yield from (value for value in map(contents_of_cell, function.__closure__ or ()) if value is not NO_VALUE)
    yield from (function.__globals__[name] for name in code.co_names if name in function.__globals__)
