"""Keep a trace out of the caches and counters that a model's code has outside its modules.

Functions cached by size, dicts and lists of a Python module or a class live on after the trace; a tensor without values
that stayed in one would break the model for good, and a call that was counted would change what it does next.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType, ModuleType, TracebackType
from typing import Any, cast

import torch

_CACHED = functools._lru_cache_wrapper
_NUMBERS = frozenset({bool, int, float})


class Caches:
    """The caches that `namespaces` (globals of Python modules) and `kinds` (classes) name. A context manager.

    Afterwards a cached function that was called with something new is emptied, what was added to a dict or a list is
    taken out where it holds a tensor for which `is_of_trace` holds, and numbers are what they were. O(names).
    """

    def __init__(
        self, namespaces: Iterable[dict[str, Any]], kinds: Iterable[type], is_of_trace: Callable[[Any], bool]
    ) -> None:
        self._is_of_trace = is_of_trace
        self._functions: dict[int, tuple[Any, int]] = {}
        self._holders: list[_Holder] = []
        bases = {base for kind in kinds for base in kind.__mro__}
        classes = {id(members): (base, members) for base, members in ((base, dict(vars(base))) for base in bases)}
        for namespace in _own_code([*namespaces, *(members for _, members in classes.values())]):
            self._holders.append(_Holder(classes[id(namespace)][0] if id(namespace) in classes else namespace))
            for name, value in list(namespace.items()):
                value = getattr(value, "__func__", value)
                value = value.fget if isinstance(value, property) else value
                if isinstance(value, _CACHED):
                    self._functions[id(value)] = (value, value.cache_info().misses)
                elif (type(value) is dict or type(value) is list) and not name.startswith("__"):
                    self._holders.append(_Holder(value))

    def changed_number(self) -> str | None:
        """Say which number the code has changed, by its key or name; None where there is none."""
        return next((repr(key) for holder in self._holders for key in holder.changed()), None)

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for function, misses in self._functions.values():
            if function.cache_info().misses != misses:
                function.cache_clear()
        for holder in self._holders:
            holder.restore(self._holds_of_trace)

    def _holds_of_trace(self, value: Any) -> bool:
        if isinstance(value, (tuple, list)):
            return any(map(self._holds_of_trace, cast(list[Any], value)))
        return isinstance(value, torch.Tensor) and self._is_of_trace(value)


class _Holder:
    """A dict, a list or a class, how long it is and which numbers stand in it."""

    def __init__(self, value: Any) -> None:
        self._value = value
        self._numbers = {key: item for key, item in self._items() if type(item) in _NUMBERS}
        self._length = len(self._content)

    @property
    def _content(self) -> Any:
        return vars(self._value) if isinstance(self._value, type) else self._value

    def _items(self) -> Iterable[tuple[Any, Any]]:
        return enumerate(self._content) if isinstance(self._value, list) else self._content.items()

    def changed(self) -> Iterator[Any]:
        """Yield the keys at which a number was changed, added or taken away."""
        content = self._content
        for key, number in self._numbers.items():
            if isinstance(content, list):
                now = content[key] if key < len(cast(list[Any], content)) else None
            else:
                now = content.get(key)
            if now is not number and (type(now) is not type(number) or now != number):
                yield key
        for key, item in self._added():
            if type(item) in _NUMBERS:
                yield key

    def restore(self, holds_of_trace: Callable[[Any], bool]) -> None:
        """Put the numbers back, and take out what was added of a trace."""
        added = self._added()
        if isinstance(self._value, list):
            if any(holds_of_trace(item) for _, item in added):
                del self._value[self._length :]
        else:
            for key in [key for key, item in added if type(item) in _NUMBERS or holds_of_trace(item)]:
                self._drop(key)
        for key in list(self.changed()):
            self._put(key, self._numbers[key])

    def _added(self) -> list[tuple[Any, Any]]:
        return list(self._items())[self._length :] if len(self._content) > self._length else []

    def _put(self, key: Any, number: Any) -> None:
        if isinstance(self._value, type):
            setattr(self._value, key, number)
        elif not isinstance(self._value, list) or key < len(cast(list[Any], self._value)):
            self._value[key] = number

    def _drop(self, key: Any) -> None:
        if isinstance(self._value, type):
            delattr(self._value, key)
        else:
            del self._value[key]


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
