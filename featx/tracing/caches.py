"""Keep tensors of a trace out of the caches that a model's code has outside its modules.

Functions cached by size, dicts and lists of a Python module or a class live on after the trace; a tensor without values
that stayed in one would break the model for good.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType, ModuleType, TracebackType
from typing import Any, cast

import torch

_CACHED = functools._lru_cache_wrapper


class Caches:
    """The caches that `namespaces` (globals of Python modules) and `kinds` (classes) name. A context manager.

    Afterwards a cached function that was called with something new is emptied, and what was added to a dict or a list
    is taken out where it holds a tensor for which `is_of_trace` holds. O(names).
    """

    def __init__(
        self, namespaces: Iterable[dict[str, Any]], kinds: Iterable[type], is_of_trace: Callable[[Any], bool]
    ) -> None:
        self._is_of_trace = is_of_trace
        self._functions: dict[int, tuple[Any, int]] = {}
        self._containers: dict[int, tuple[Any, int]] = {}
        for namespace in _own_code([*namespaces, *(dict(vars(base)) for kind in kinds for base in kind.__mro__)]):
            for value in list(namespace.values()):
                value = getattr(value, "__func__", value)
                value = value.fget if isinstance(value, property) else value
                if isinstance(value, _CACHED):
                    self._functions[id(value)] = (value, value.cache_info().misses)
                elif type(value) is dict or type(value) is list:
                    self._containers[id(value)] = (value, len(cast(list[Any], value)))

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for function, misses in self._functions.values():
            if function.cache_info().misses != misses:
                function.cache_clear()
        for container, length in self._containers.values():
            if len(container) > length:
                self._take_out(container, length)

    def _take_out(self, container: Any, length: int) -> None:
        if isinstance(container, dict):
            added = list(cast(dict[Any, Any], container))[length:]
            for key in added:
                if self._holds_of_trace(container[key]):
                    del container[key]
        elif any(map(self._holds_of_trace, container[length:])):
            del container[length:]

    def _holds_of_trace(self, value: Any) -> bool:
        if isinstance(value, (tuple, list)):
            return any(map(self._holds_of_trace, cast(list[Any], value)))
        return isinstance(value, torch.Tensor) and self._is_of_trace(value)


def _own_code(namespaces: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the namespaces, and those of Python modules and functions that they name, without torch's own."""
    seen: set[int] = set()
    for namespace in namespaces:
        named = [value for value in list(namespace.values()) if isinstance(value, (ModuleType, FunctionType))]
        found = [value.__dict__ if isinstance(value, ModuleType) else value.__globals__ for value in named]
        for candidate in (namespace, *found):
            name = str(candidate.get("__name__") or candidate.get("__module__"))
            if (
                id(candidate) not in seen
                and "__path__" not in candidate
                and not name.startswith(("torch.", "builtins"))
            ):
                seen.add(id(candidate))
                yield candidate
