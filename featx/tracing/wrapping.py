"""Record calls of chosen Python functions as one node each, instead of tracing through them.

Which functions: those marked with `wrap`, and those that a tracer is told of. For the time of a trace a pass-through
is laid over them in the globals of the modules of Python that call them; it records a call that has a traced value
among its arguments and passes every other one on, so other threads do not notice.
"""

from __future__ import annotations

import builtins
import functools
import inspect
import random
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from threading import Lock, get_ident
from types import BuiltinMethodType, FunctionType, MethodType, ModuleType
from typing import Any, TypeVar, cast

import torch

from featx.errors import ArgumentTypeError, TraceError
from featx.tracing.proxy import find_proxy

Recorder = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
_CACHED = functools._lru_cache_wrapper
_F = TypeVar("_F", bound=Callable[..., Any] | str)
# Where a Python module keeps the names of its own functions that `wrap` marked.
_MARK = "__featx_wrapped__"


def wrap(fn_or_name: _F) -> _F:
    """Mark a global function so that a symbolic trace records a call of it as one node.

    Use it as a decorator, or call it at the top level of a Python module with the function or its name (builtins
    such as "len" too). Calls through the global name of that module are seen if the traced code, or a module or
    function that it names, is in that module. Returns its argument.

    Raises:
        ArgumentTypeError: the argument is neither a function nor a string.
        TraceError: it is a name, and this is not the top level of a module.
    """
    if isinstance(fn_or_name, str):
        frame = sys._getframe(1)
        if frame.f_code.co_name != "<module>":
            raise TraceError(f"wrap({fn_or_name!r}) must be called at the top level of a Python module")
        frame.f_globals.setdefault(_MARK, set()).add(fn_or_name)
    elif callable(fn_or_name) and hasattr(fn_or_name, "__globals__"):
        function = cast(Any, fn_or_name)
        function.__globals__.setdefault(_MARK, set()).add(function.__name__)
    elif callable(fn_or_name):
        frame = sys._getframe(1)
        frame.f_globals.setdefault(_MARK, set()).add(cast(Any, fn_or_name).__name__)
    else:
        raise ArgumentTypeError(f"wrap takes a function or the name of one, got {fn_or_name!r}")
    return cast(_F, fn_or_name)


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
def wrapped_functions(
    seen_globals: Iterable[dict[str, Any]],
    modules: Iterable[ModuleType],
    functions: Iterable[Callable[..., Any]],
    refuse_draw: Recorder,
    record: Recorder | None = None,
) -> Generator[None]:
    """Record calls of wrapped functions, of `functions`, and of the public functions of `modules`.

    They are found where their Python module marked them, in `modules` themselves, and in `seen_globals`: the globals
    of the code that will be traced. So are functions of einops. A call of a random function of Python or numpy by this
    thread goes to `refuse_draw`. Any other goes to `record`, if there is one, and so do then functions that are cached;
    without it, one with a traced value among its arguments is recorded by the tracer of that. O(size of those).
    """
    seen = list(seen_globals)
    wanted = {id(function) for function in functions}
    for module in modules:
        functions = (_original(value) for name, value in module.__dict__.items() if _is_public_function(name, value))
        wanted.update(id(function) for function in functions)
    places: dict[tuple[int, str], dict[str, Any]] = {}
    for namespace, names in _marked(_with_referenced(seen)):
        for name in names:
            places[id(namespace), name] = namespace
            if name in namespace:
                wanted.add(id(_original(namespace[name])))
    for namespace in (*seen, *(module.__dict__ for module in modules)):
        for name, value in namespace.items():
            original = _original(value)
            is_wanted = id(original) in wanted or original is torch or _is_of_einops(original)
            if is_wanted and not name.startswith("__"):
                places[id(namespace), name] = namespace
    for namespace in _code_of_models(seen):
        if record is not None and "range" not in namespace:
            places[id(namespace), "range"] = namespace
        for name, value in namespace.items():
            original = _original(value)
            if _is_opaque_to_proxies(original) or (record is not None and isinstance(original, _CACHED)):
                places[id(namespace), name] = namespace
    for namespace, name in _random_functions(seen):
        places.setdefault((id(namespace), name), namespace)
    laid: list[tuple[dict[str, Any], str, _PassThrough, Recorder | None]] = []
    lock = Lock()
    try:
        for (_, name), namespace in places.items():
            entry = _lay(namespace, name, lock)
            if entry is not None:
                # A trace inside a trace of this thread comes before it.
                laid.append((namespace, name, entry, entry.recorders.get(get_ident())))
                recorder = refuse_draw if _is_random(entry.function) else record
                if recorder is not None:
                    entry.recorders[get_ident()] = recorder
        yield
    finally:
        for namespace, name, entry, earlier in laid:
            _lift(namespace, name, entry, earlier)


def globals_of(function: Callable[..., Any], kinds: Iterable[type]) -> list[dict[str, Any]]:
    """Return the globals of `function` and of the forward methods of classes of modules, each once."""
    found: dict[int, dict[str, Any]] = {}
    # torch's own modules are leaves, and hold no function that anybody wraps.
    own: list[Any] = [kind for kind in kinds if kind.__module__[:6] != "torch."]
    for candidate in (inspect.unwrap(function), *(kind.forward for kind in own)):
        namespace = getattr(candidate, "__globals__", None)
        if namespace is not None:
            found[id(namespace)] = namespace
    return list(found.values())


def _original(value: Any) -> Any:
    """Return what `value` stands in for, if another trace has laid it."""
    return value.function if type(value) in (_PassThrough, _Torch, _Autograd) else value


def _is_of_einops(value: Any) -> bool:
    return type(value) is FunctionType and str(value.__module__).startswith("einops")


def _is_opaque_to_proxies(value: Any) -> bool:
    # What runs in C++ on the way, where a proxy is an error or, for autograd, loses what `backward` does.
    return type(value) is torch.jit.ScriptFunction or (
        isinstance(value, type) and issubclass(value, torch.autograd.Function)
    )


def _is_public_function(name: str, value: object) -> bool:
    return not name.startswith("_") and callable(value) and not isinstance(value, type)


def _marked(namespaces: Iterable[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], set[str]]]:
    for namespace in namespaces:
        if _MARK in namespace:
            yield namespace, namespace[_MARK]
    # Libraries mark their functions for torch.fx (torchvision's swin does), and are taken at their word. torch.fx is
    # looked up where it is loaded anyway; it is not imported.
    tracing = sys.modules.get("torch.fx._symbolic_trace")
    registry: dict[tuple[int, str], dict[str, Any]] = getattr(tracing, "_wrapped_fns_to_patch", {})
    for (_, name), namespace in list(registry.items()):
        yield namespace, {name}


def _random_functions(seen_globals: Iterable[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], str]]:
    numpy = sys.modules.get("numpy")
    numpy_random = numpy.random if numpy else None
    for namespace in seen_globals:
        for name, value in list(namespace.items()):
            if _is_random(value):
                yield namespace, name
            elif value is random or (numpy is not None and (value is numpy or value is numpy_random)):
                owner = (random if value is random else numpy_random).__dict__
                yield from ((owner, function) for function in owner if _is_random(owner[function]))


def _is_random(value: Any) -> bool:
    value = _original(value)
    # The functions of both modules are methods of one hidden generator each.
    owner = getattr(value, "__self__", None) if type(value) in _METHOD_TYPES else None
    return (
        owner is not None and type(owner).__name__ in ("Random", "RandomState") and value.__name__ not in _STATE_NAMES
    )


def _code_of_models(seen_globals: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the given globals and those of the functions that they name, without torch's own."""
    found = {id(namespace): namespace for namespace in seen_globals}
    for namespace in list(found.values()):
        for value in list(namespace.values()):
            if type(value) is FunctionType and not str(value.__globals__.get("__name__")).startswith("torch."):
                found[id(value.__globals__)] = value.__globals__
    return list(found.values())


def _with_referenced(seen_globals: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the given globals and those of the functions and modules that they name."""
    found = {id(namespace): namespace for namespace in seen_globals}
    for namespace in list(found.values()):
        for value in namespace.values():
            kind = type(value)
            if kind is FunctionType:
                found[id(value.__globals__)] = value.__globals__
            elif kind is ModuleType:
                found[id(value.__dict__)] = value.__dict__
    return list(found.values())


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
