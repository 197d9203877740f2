"""Find what hooks of a model may have stored in an earlier call.

Hooks of modules that are kept whole do not run in a trace. A tensor that such a hook stores, and that forward then
reads, would be that of the last call, and a constant of the graph. So the trace starts again, and looks into the
modules that have hooks.
"""

from __future__ import annotations

import ast
import functools
import inspect
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from contextvars import ContextVar
from types import FunctionType
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
from featx.tracing.source.location import definition_of
from featx.tracing.source.reachable import function_behind

# How many objects deep the code of a call is followed: `self.recorder.store.get()`.
_DEPTH = 3
_CONTAINERS = (list, deque, dict, set)
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

    def check_result(self, module: nn.Module, result: Any) -> None:
        """Ask for hooks to run where a module may return another structure for keywords that a hook of it changes.

        Such as `need_weights` of nn.MultiheadAttention.
        """
        if self.are_run or isinstance(result, torch.Tensor) or not module._forward_pre_hooks_with_kwargs:
            return
        if any(
            map(_may_change_keywords, (module._forward_pre_hooks[key] for key in module._forward_pre_hooks_with_kwargs))
        ):
            raise NeedsHooks

    @functools.cached_property
    def _hooked(self) -> list[nn.Module]:
        return [self._roots[-1].get_submodule(path) for path in self._paths]

    def check_read(self, modules: Iterable[nn.Module], paths: Iterable[str]) -> None:
        """Raise where forward of one of `modules` may read what hooks change, of modules at `paths` or inside these."""
        hooks = [hook for hook in self._hooks_inside(paths) if _names_changed_by(hook)] if self._paths else []
        changed = frozenset(name for hook in hooks for name in _names_changed_by(hook))
        for module in modules if hooks else ():
            names, values = _read_by(module)
            read = changed & names
            if read:
                self.refuse_stored(f"perhaps in '{min(read)}',")
            if any(id(container) in values for hook in hooks for container in _containers_changed_by(hook)):
                self.refuse_stored()

    def _hooks_inside(self, paths: Iterable[str]) -> list[Any]:
        inside = [path for path in self._paths if any(f"{path}.".startswith(f"{each}.") for each in paths)]
        return [hook for root in self._roots for path in inside for hook in _hooks_of(root.get_submodule(path))]

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
    owner, function = _code_of(hook)
    return frozenset() if function is None else names_changed_in(function, type(owner))


def _may_change_keywords(hook: Any) -> bool:
    """Say whether a hook may return other keywords, or write into those that it gets. Without source: yes."""
    function = _code_of(hook)[1]
    definition = None if function is None else definition_of(function)
    if definition is None or isinstance(definition, ast.Lambda):
        return True
    nodes = list(ast.walk(definition))
    values = [node.value for node in nodes if isinstance(node, ast.Return)]
    returns = any(value is not None and not isinstance(value, ast.Constant) for value in values)
    keywords = definition.args.args[-1].arg if definition.args.args else ""
    written = [node.value for node in nodes if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)]
    written += [
        node.func.value for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    ]
    return returns or any(isinstance(value, ast.Name) and value.id == keywords for value in written)


def _code_of(hook: Any) -> tuple[Any, FunctionType | None]:
    """Return the function behind a hook, and the object whose method it is; None where it is no function."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    function = getattr(
        hook, "__func__", hook if inspect.isfunction(hook) else inspect.getattr_static(type(hook), "__call__", None)
    )
    owner = getattr(hook, "__self__", hook)
    return owner, inspect.unwrap(function) if inspect.isfunction(function) else None


def _read_by(module: nn.Module) -> tuple[set[str], set[int]]:
    """Return the names that a call of a module may read, and the ids of the values of its attributes among them.

    Methods of the objects that these attributes hold count too, such as `get` in `self.store.get(key)`.
    """
    names, found = set(names_read_in(forward_of(module), type(module))), set[int]()
    level: list[Any] = [module]
    for _ in range(_DEPTH):
        held = [value for owner in level for name, value in _attributes(owner).items() if name in names]
        level = [value for value in held if id(value) not in found and not isinstance(value, torch.Tensor)]
        found.update(map(id, held))
        for kind in dict.fromkeys(map(type, level)):
            methods = [function_behind(inspect.getattr_static(kind, name, None)) for name in names]
            names.update(*(names_read_in(method, kind) for method in methods if method is not None))
    return names, found


def _attributes(owner: Any) -> dict[str, Any]:
    attributes = getattr(owner, "__dict__", {})
    return {**attributes, **owner._modules} if isinstance(owner, nn.Module) else attributes


def _containers_changed_by(hook: Any) -> Iterator[Any]:
    """Yield the lists, dicts, sets and deques under the names that a hook changes, and in arguments of a partial."""
    changed = _names_changed_by(hook)
    while isinstance(hook, functools.partial):
        yield from (value for value in (*hook.args, *hook.keywords.values()) if isinstance(value, _CONTAINERS))
        hook = hook.func
    function = inspect.unwrap(getattr(hook, "__func__", hook))
    held = dict(_attributes(getattr(hook, "__self__", hook)))
    if inspect.isfunction(function):
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        held |= {name: contents_of_cell(cell) for name, cell in cells}
        held |= {name: function.__globals__[name] for name in changed & function.__globals__.keys()}
    yield from (held[name] for name in changed & held.keys() if isinstance(held[name], _CONTAINERS))


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
