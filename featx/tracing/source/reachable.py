"""Find the functions that a call of a function may run, by the names in its code."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

from featx.tracing.objects.replaced_globals import global_of
from featx.tracing.source.frames import is_library_code
from featx.tracing.source.imports import imported_in
from featx.tracing.source.location import names_in


def functions_reached(function: Any, kind: type | None) -> Iterator[tuple[FunctionType, bool]]:
    """Yield each function that a call may run, and whether it is `function` itself.

    Followed are methods and properties of `kind`, functions that are globals of the code or that it imports, and those
    of modules that it names, but none of torch or Python. O(code that can be reached).
    """
    first = inspect.unwrap(getattr(function, "__func__", function))
    seen: set[CodeType] = set()
    pending: list[Any] = [first]
    while pending:
        callee = pending.pop()
        code: CodeType | None = getattr(callee, "__code__", None)
        if code is None or code in seen or is_library_code(code):
            continue
        seen.add(code)
        names = names_in(code)
        pending += [each for name in names for each in functions_named(name, callee, kind)]
        imported = list(imported_in(callee).values())
        pending += [each for value in imported if (each := function_behind(value)) is not None]
        pending += _functions_of_modules(names, [*(global_of(callee, name) for name in names), *imported])
        yield callee, callee is first


def functions_named(name: str, function: FunctionType, kind: type | None) -> list[FunctionType]:
    """Return the functions that a name may mean in the code of `function`: a global, and a method of `kind`."""
    found = (global_of(function, name), inspect.getattr_static(kind, name, None) if kind else None)
    return [each for value in found if (each := function_behind(value)) is not None]


def _functions_of_modules(names: frozenset[str], values: Iterable[Any]) -> Iterator[FunctionType]:
    """Yield the functions with one of `names` in Python modules among `values` and in those inside: `utils.mix`."""
    modules = {value: None for value in values if isinstance(value, ModuleType)}
    pending = list(modules)
    while pending:
        namespace = vars(pending.pop())
        for name in names:
            value = namespace.get(name)
            if isinstance(value, ModuleType) and value not in modules:
                modules[value] = None
                pending.append(value)
            elif (found := function_behind(value)) is not None:
                yield found


def function_behind(value: object) -> FunctionType | None:
    """Return the function behind what a namespace holds: a method, a property, or a cached or wrapped function."""
    if isinstance(value, property):
        value = value.fget
    elif isinstance(value, functools.cached_property):
        value = value.func
    elif isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    if isinstance(value, (FunctionType, functools._lru_cache_wrapper)):
        value = inspect.unwrap(value)
    return value if isinstance(value, FunctionType) else None
