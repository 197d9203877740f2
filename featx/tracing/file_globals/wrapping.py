"""Record calls of chosen Python functions as one node each, instead of tracing through them.

Which functions: those marked with `wrap`, and those that are given to a tracer. During a trace a pass-through
replaces them in the globals of the Python modules that call them; it records a call that has a traced value
among its arguments and passes every other one on, so other threads do not notice.
"""

from __future__ import annotations

import functools
import inspect
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, filterfalse
from types import BuiltinMethodType, FunctionType, MethodType, ModuleType
from typing import Any, TypeVar, cast

import torch

from featx.errors import ArgumentTypeError, TraceError
from featx.ir.runtime_checks import is_runtime_check
from featx.ir.torch_layers import is_of_torch
from featx.libraries import globals_of_einops, is_of_einops, names_of_masks
from featx.tracing.file_globals.pass_through import GlobalName, answered_as, is_random
from featx.tracing.objects.arrays import functions_of_sizes
from featx.tracing.objects.replaced_globals import ReplacedGlobal, original_of

_CACHED = functools._lru_cache_wrapper
_F = TypeVar("_F", bound=Callable[..., Any] | str)
# Where a Python module keeps the names of its own functions that `wrap` marked.
_MARK = "__featx_wrapped__"
_BUILTINS = ("range", "min", "max", "type")


def wrap(fn_or_name: _F) -> _F:
    """Mark a global function so that a symbolic trace records a call of it as one node.

    Use it as a decorator, or call it at the top level of a Python module with the function or its name (builtins
    such as "len" too). Calls through the global name of that module are seen if the traced code, or a module or
    function that it names, is in that module. Returns its argument.

    Raises:
        ArgumentTypeError: the argument is neither a function nor a string.
        TraceError: it is a name, and this is not the top level of a module.
    """
    frame = sys._getframe(1)
    if isinstance(fn_or_name, str):
        if frame.f_code.co_name != "<module>":
            raise TraceError(f"wrap({fn_or_name!r}) must be called at the top level of a Python module")
        frame.f_globals.setdefault(_MARK, set()).add(fn_or_name)
    elif callable(fn_or_name) and hasattr(fn_or_name, "__name__"):
        namespace = getattr(fn_or_name, "__globals__", frame.f_globals)  # a builtin function has none
        namespace.setdefault(_MARK, set()).add(cast(Any, fn_or_name).__name__)
    else:
        raise ArgumentTypeError(f"wrap takes a function or the name of one, got {fn_or_name!r}")
    return cast(_F, fn_or_name)


def find_names_to_replace(
    seen_globals: Iterable[dict[str, Any]],
    modules: Iterable[ModuleType],
    functions: Iterable[Callable[..., Any]],
    *,
    is_recording: bool,
    follows_marked: bool = False,
) -> list[GlobalName]:
    """Find where wrapped functions, `functions`, and the public functions of `modules` have names.

    They are looked for where their Python module marked them, in `modules` themselves, and in `seen_globals`: the
    globals of the code that will be traced. So are functions of einops, and those of Python and numpy that draw. For a
    trace that is recording, functions that are cached, and `range`, `min` and `max` come with them. With
    `follows_marked`, those that their Python module has marked are none of them. O(size of those).
    """
    seen = list(seen_globals)
    of_functions, of_modules = globals_named(seen, FunctionType), globals_named(seen, ModuleType)
    given = [module.__dict__ for module in modules]
    public = (value for each in given for name, value in each.copy().items() if _is_public_function(name, value))
    wanted = {id(original_of(function)) for function in (*functions, *public)}
    places: list[GlobalName] = []
    for namespace, names in () if follows_marked else _marked([*seen, *of_functions, *of_modules]):
        places += [(namespace, name) for name in names]
        wanted.update(id(original_of(namespace[name])) for name in names if name in namespace)

    def is_one_node(value: Any) -> bool:
        return id(value) in wanted or is_of_einops(value)

    def is_not_followed(value: Any) -> bool:
        return _is_opaque_to_proxies(value) or (is_recording and isinstance(value, _CACHED))

    code_of_models = each_once([*seen, *filterfalse(_is_of_library, of_functions)])
    # The code of a Python module may run as `library.function(x)`.
    code_of_modules = list(filterfalse(_is_of_library, of_modules))
    places += _names_of(is_one_node, [*seen, *given])
    places += _names_of(lambda value: value is torch, each_once([*code_of_models, *given, *code_of_modules]))
    places += _names_of(is_not_followed, code_of_models)
    places += _names_of(_is_opaque_to_proxies, code_of_modules)
    places += _names_of(is_of_einops, [globals_of_einops()])  # code may import them within a function
    places += _random_functions(seen)
    if is_recording:
        own_code = list(filterfalse(_is_of_torch, code_of_models))
        places += _names_of(lambda value: answered_as(value) is not None, own_code)
        places += [(namespace, name) for namespace in own_code for name in _BUILTINS if name not in namespace]
        places += names_of_masks(seen)
        places += _functions_of_numpy(own_code)
        places.append((torch.utils.__dict__, "swap_tensors"))  # Module.to and load_state_dict call it there
    return list({(id(namespace), name): (namespace, name) for namespace, name in places}.values())


def _names_of(is_wanted: Callable[[Any], bool], namespaces: Iterable[dict[str, Any]]) -> Iterator[GlobalName]:
    """Yield where namespaces have what is wanted, or what stands in for it."""
    for namespace in namespaces:
        for name, value in namespace.copy().items():
            if is_wanted(original_of(value)) and not name.startswith("__"):
                yield namespace, name


def globals_of(
    function: Callable[..., Any], kinds: Iterable[type], held: Iterable[FunctionType] = ()
) -> list[dict[str, Any]]:
    """Return the globals of `function`, of the forward methods of classes of modules, and of functions `held`.

    Those of a method that is decorated, as by `torch.autocast`, are those of what is decorated, too.
    """
    found = {id(each.__globals__): each.__globals__ for each in held if not _is_of_library(each.__globals__)}
    # torch's own modules are leaves, and hold no function that anybody wraps.
    own: list[Any] = [kind for kind in kinds if not is_of_torch(kind)]
    forwards = (each for kind in own for each in (kind.forward, inspect.unwrap(kind.forward)))
    for candidate in (inspect.unwrap(function), *forwards):
        namespace = getattr(candidate, "__globals__", None)
        if namespace is not None:
            found[id(namespace)] = namespace
    return list(found.values())


def _is_opaque_to_proxies(value: Any) -> bool:
    # What runs in C++ on the way, where a proxy is an error or, for autograd, loses what `backward` does. The name of a
    # function may stand for `apply`, which torch has in Python up to 2.13: `straight_through = StraightThrough.apply`.
    is_apply = type(value) in (BuiltinMethodType, MethodType) and value.__name__ == "apply"
    kind = value.__self__ if is_apply else value
    return type(value) is torch.jit.ScriptFunction or (
        isinstance(kind, type) and issubclass(kind, torch.autograd.Function)
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
        if not is_runtime_check(namespace.get(name)):  # which torch.fx marks where it writes code of a graph with one
            yield namespace, {name}


def _random_functions(seen_globals: Iterable[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], str]]:
    numpy = sys.modules.get("numpy")
    numpy_random = numpy.random if numpy else None
    for namespace in seen_globals:
        for name, value in namespace.copy().items():
            if is_random(value):
                yield namespace, name
            elif value is random or (numpy is not None and (value is numpy or value is numpy_random)):
                owner = (random if value is random else numpy_random).__dict__
                yield from ((owner, function) for function in owner if is_random(owner[function]))


def _functions_of_numpy(seen_globals: Iterable[dict[str, Any]]) -> Iterator[GlobalName]:
    numpy, functions = sys.modules.get("numpy"), functions_of_sizes()
    known = {id(function) for function in functions.values()}
    for namespace in seen_globals if numpy is not None else ():
        for name, value in namespace.copy().items():
            if value is numpy:
                yield from ((numpy.__dict__, each) for each in functions)
            elif id(value) in known or (isinstance(value, ReplacedGlobal) and id(value.function) in known):
                yield namespace, name


def globals_named(seen_globals: Iterable[dict[str, Any]], kind: type) -> list[dict[str, Any]]:
    """Return the globals of the functions, or of the Python modules, that the given globals name."""
    values: Iterable[Any] = chain.from_iterable(each.copy().values() for each in seen_globals)
    found = (value for value in values if isinstance(value, kind))
    return each_once(value.__globals__ if kind is FunctionType else value.__dict__ for value in found)


def each_once(namespaces: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return namespaces in their order, without those that came before."""
    return list({id(each): each for each in namespaces}.values())


def _is_of_library(namespace: dict[str, Any]) -> bool:
    name = str(namespace.get("__name__")).partition(".")[0]
    return name in sys.stdlib_module_names or _is_of_torch(namespace)


def _is_of_torch(namespace: dict[str, Any]) -> bool:
    """Say whether a namespace belongs to torch or featx, whose functions must be found there as they are."""
    return str(namespace.get("__name__")).partition(".")[0] in ("torch", "featx")
