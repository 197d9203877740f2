"""Pass-throughs, which are laid over functions in the globals of Python modules for the time of a trace."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from functools import partial
from threading import Lock, get_ident
from types import BuiltinMethodType, MethodType
from typing import Any, cast

import torch

from featx.tracing.proxy import find_proxy

Recorder = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
# A name in a namespace.
Place = tuple[dict[str, Any], str]


class _PassThrough:
    """Stands in for `function` under a global name; as a callable it looks like it."""

    __slots__ = ("function", "is_removed", "lock", "recorders", "traces", "was_global")

    def __init__(self, function: Callable[..., Any], was_global: bool, lock: Lock) -> None:
        self.function = function
        self.was_global = was_global
        self.lock = lock
        self.traces = 0
        # What answers in a thread in place of the function.
        self.recorders: dict[int, Recorder] = {}
        self.is_removed = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        recorder = self.recorders.get(get_ident()) if self.recorders else None
        if recorder is not None:
            return recorder(self.function, args, kwargs)
        proxy = find_proxy((args, kwargs))
        if proxy is None:
            return self.function(*args, **kwargs)
        result = proxy.tracer.create_proxy("call_function", self.function, args, kwargs)
        result.node.meta["is_wrapped"] = True
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self.function, name)

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, cast(Any, self.function))


class _Torch(_PassThrough):
    """Stands in for the module torch in a model's globals, so that `torch.zeros(height, 3)` takes traced sizes.

    torch's argument parser wants to see an integer first where sizes are not in a tuple, so they are put into one.
    """

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        value = getattr(torch, name)
        recorder = self.recorders.get(get_ident()) if self.recorders and name == "is_grad_enabled" else None
        if recorder is not None:
            return lambda: recorder(value, (), {})
        return partial(_with_sizes_in_a_tuple, value) if name in _FACTORIES else value


class _Autograd(_PassThrough):
    """Stands in for a subclass of `torch.autograd.Function`: its `apply` is one node, so that its `backward` stays."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.function, name)
        if name != "apply":
            return value
        apply = _PassThrough(value, True, self.lock)
        apply.recorders = self.recorders
        return apply


def _with_sizes_in_a_tuple(factory: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if len(args) > 1 and find_proxy(args) is not None:
        return factory(args, **kwargs)
    return factory(*args, **kwargs)


_FACTORIES = frozenset({"zeros", "ones", "rand", "randn", "empty"})
_METHOD_TYPES = (BuiltinMethodType, MethodType)
_STATE_NAMES = frozenset({"getstate", "setstate", "get_state", "set_state", "seed"})


@contextmanager
def wrapped(places: Iterable[Place], refuse_draw: Recorder, record: Recorder | None = None) -> Generator[None]:
    """Send this thread's calls of the functions at `places` to a handler.

    Those that draw from a random generator of Python or numpy go to `refuse_draw`, all others to `record`; without it,
    one with a traced value among its arguments is recorded by the tracer of that. O(places).
    """
    laid: list[tuple[dict[str, Any], str, _PassThrough, Recorder | None]] = []
    lock = Lock()
    try:
        for namespace, name in places:
            entry = _lay(namespace, name, lock)
            if entry is not None:
                # A trace inside a trace of this thread comes before it.
                laid.append((namespace, name, entry, entry.recorders.get(get_ident())))
                recorder = refuse_draw if is_random(entry.function) else record
                if recorder is not None:
                    entry.recorders[get_ident()] = recorder
        yield
    finally:
        for namespace, name, entry, earlier in laid:
            _lift(namespace, name, entry, earlier)


def original_of(value: Any) -> Any:
    """Return what `value` stands in for, if another trace has laid it."""
    return value.function if type(value) in (_PassThrough, _Torch, _Autograd) else value


def is_random(value: Any) -> bool:
    """Say whether a value, or what it stands in for, is a function of Python or numpy that draws random numbers."""
    value = original_of(value)
    # The functions of both modules are methods of one hidden generator each.
    owner = getattr(value, "__self__", None) if type(value) in _METHOD_TYPES else None
    return (
        owner is not None and type(owner).__name__ in ("Random", "RandomState") and value.__name__ not in _STATE_NAMES
    )


def _lay(namespace: dict[str, Any], name: str, lock: Lock) -> _PassThrough | None:
    while True:
        function = namespace.get(name, getattr(builtins, name, None))
        if function is None:
            return None
        fresh = _kind_for(function)(function, name in namespace, lock)
        entry = function if isinstance(function, _PassThrough) else fresh
        if entry is fresh:
            namespace[name] = fresh
        with entry.lock:
            if not entry.is_removed and namespace.get(name) is entry:
                entry.traces += 1
                return entry


def _kind_for(function: Any) -> type[_PassThrough]:
    if function is torch:
        return _Torch
    return _Autograd if isinstance(function, type) and issubclass(function, torch.autograd.Function) else _PassThrough


def _lift(namespace: dict[str, Any], name: str, entry: _PassThrough, earlier: Recorder | None) -> None:
    with entry.lock:
        if earlier is None:
            entry.recorders.pop(get_ident(), None)
        else:
            entry.recorders[get_ident()] = earlier
        entry.traces -= 1
        if entry.traces:
            return
        entry.is_removed = True
        if namespace.get(name) is entry:
            if entry.was_global:
                namespace[name] = entry.function
            else:
                del namespace[name]
