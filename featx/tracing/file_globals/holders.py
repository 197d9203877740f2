"""Dicts, lists, classes and variables of closures outside of a model's modules, and what was in them."""

from __future__ import annotations

import builtins
import functools
import operator
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, ModuleType
from typing import Any, cast

import torch

from featx.rebuilding import NO_VALUE, contents_of_cell
from featx.tracing.objects.containers import LARGE, containers_in, copy_of
from featx.tracing.objects.replaced_globals import original_of

# The keys of what has one place altogether: the definitions of a namespace, and the environment variables.
DEFINITIONS = "functions and classes"
ENVIRONMENT = "environment variables"
# The key of the numbers and texts in a list or dict, of which there may be more later.
PLAIN_ITEMS = "numbers and texts"
# The types of plain values, with which code counts or switches between what it does.
_NUMBERS_AND_TEXTS = (bool, int, float, complex, str, bytes)
# What code defines once.
_DEFINITIONS = frozenset(
    {
        FunctionType, BuiltinFunctionType, functools._lru_cache_wrapper, ModuleType, type, staticmethod, classmethod,
        property,
    }
)  # fmt: skip


class Holder:
    """A dict, a list or a class, and what was in it.

    Attributes:
        value: that dict, list or class.
    """

    def __init__(self, value: Any) -> None:
        self.value = value
        self._before = self._now()
        # What it held when plain values were accepted last.
        self._accepted: dict[Any, Any] | None = None

    def _now(self) -> dict[Any, Any]:
        value = self.value
        if isinstance(value, list):
            return dict(enumerate(cast(list[Any], value)))
        return dict(vars(value)) if isinstance(value, type) else copy_of(value)

    def is_untouched(self) -> bool:
        """Say whether it holds what it held."""
        now = vars(self.value) if isinstance(self.value, type) else self.value
        if len(now) != len(self._before):
            return False
        # A list, as another thread may add to it meanwhile.
        values = list(now if isinstance(now, list) else dict.values(now) if isinstance(now, dict) else now.values())
        return len(values) == len(self._before) and all(map(operator.is_, values, self._before.values()))

    def readers(self) -> Iterator[tuple[tuple[int, Any], Callable[[Any], Any], Any]]:
        """Yield, for each value here that code may set and put back, its place and what reads it, with an argument.

        The place is the id of the holder and a key; None for its length. Large holders are left out. All definitions in
        a namespace or a dict have one place.
        """
        value: Any = self.value
        if isinstance(value, list):
            if len(value) <= LARGE:
                yield (id(value), None), _Known().items_of, value
                yield (id(value), PLAIN_ITEMS), _PlainItems(), value
            return
        is_namespace = isinstance(value, type) or (isinstance(value, dict) and "__builtins__" in value)
        if not is_namespace and len(cast(Any, value)) > LARGE:
            return
        if isinstance(value, dict):  # a class may override `get`
            get = cast(dict[Any, Any], value).get if type(value) is dict else functools.partial(dict.get, value)
        else:
            get = (vars(value) if isinstance(value, type) else value).get
        definitions: list[Any] = []
        for key, item in self._before.items():
            # What a trace, of whatever thread, lays over functions can be called too.
            if type(item) in _DEFINITIONS or (is_namespace and callable(item)):
                definitions.append(key)
            elif not (is_namespace and key.startswith("__")):
                yield (id(value), key), get, key
        if is_namespace:  # a trace lays functions over builtins, too, and takes them away again
            definitions = [key for key in definitions if not key.startswith("__") and key not in vars(builtins)]
        else:
            yield (id(value), None), dict.__len__ if isinstance(value, dict) else len, value
            # Those that are replaced have places of their own.
            yield (id(value), PLAIN_ITEMS), _PlainItems(besides=len(cast(Any, value))), value
        if definitions and (is_namespace or type(value) is dict):
            get_all = _DefinitionsOf(definitions)
            yield (id(value), DEFINITIONS), get_all, vars(value) if isinstance(value, type) else value

    def changed_plain_values(self) -> list[Any]:
        """Return the keys at which a plain value was changed, added or taken away, since they were accepted last."""
        if self.is_untouched():
            return []
        return self._changed_since(self._before if self._accepted is None else self._accepted)

    def may_be_read_by(self, code: CodeType, namespace: Mapping[str, Any], key: Any) -> bool:
        """Say whether code, which has these globals, names the value at `key`: it or, where it is no text, its list."""
        if type(key) is str:
            return key in set(_names_in(code))
        named = (namespace.get(name) for name in code.co_names)
        return key in code.co_consts or any(each is self.value for each in containers_in(named))

    def accept_plain_values(self) -> None:
        """Take plain values as they are now for unchanged."""
        if not self.is_untouched():
            self._accepted = self._now()

    def _changed_since(self, before: dict[Any, Any]) -> list[Any]:
        now = self._now()
        return [
            key
            for key in {**before, **now}
            if now.get(key) is not before.get(key) and _is_other_plain_value(now.get(key), before.get(key))
        ]

    def restore(self, holds_of_trace: Callable[[Any], bool]) -> dict[Any, Any]:
        """Put back what was there where a plain value changed, or where a tensor or something of a trace is now.

        Returns:
            What has taken the place of a tensor, and what holds something of a trace.
        """
        if self.is_untouched():
            return {}
        now, self._accepted = self._now(), None
        changed = ((key, item, self._before.get(key)) for key, item in now.items())
        left = {
            key: item
            for key, item, before in changed
            if item is not before and (isinstance(before, torch.Tensor) or holds_of_trace(item))
        }
        keys = {*left, *self._changed_since(self._before)}
        if isinstance(self.value, list):
            if keys:
                self.value[:] = self._items_without(keys, now)
            return left
        for key in keys:
            if key in self._before:
                self._put(key, self._before[key])
            else:
                self._drop(key)
        return left

    def _items_without(self, places: Collection[int], now: dict[int, Any]) -> list[Any]:
        """Return the items of a list as they were, and those that another thread has appended meanwhile."""
        before = list(self._before.values())
        if any(place not in places and now.get(place) is not item for place, item in enumerate(before)):
            return before  # items were inserted or removed
        return before + [item for place, item in now.items() if place >= len(before) and place not in places]

    def put(self, items: dict[Any, Any]) -> None:
        """Put items there; what stood behind the end of a list comes to its end."""
        for key, item in items.items():
            if isinstance(self.value, list) and key >= len(self._before):
                self.value.append(item)
            else:
                self._put(key, item)

    def _put(self, key: Any, item: Any) -> None:
        if isinstance(self.value, type):
            setattr(self.value, key, item)
        else:
            self.value[key] = item

    def _drop(self, key: Any) -> None:
        if isinstance(self.value, type):
            delattr(self.value, key)
        else:
            del self.value[key]


class _Known:
    """Tuples that were read before, so that the same items give the same tuple."""

    def __init__(self) -> None:
        self._known: list[tuple[Any, ...]] = []

    def items_of(self, value: list[Any]) -> tuple[Any, ...]:
        """Return the items of a list."""
        return self.of(tuple(value))

    def entries_of(self, value: Mapping[Any, Any]) -> tuple[Any, ...]:
        """Return the keys and values of a mapping of texts, which are other objects when they are set again."""
        entries = (*value, *value.values())
        return next((known for known in self._known if known == entries), None) or self.of(entries)

    def of(self, items: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the tuple of these very items."""
        for known in self._known:
            if len(items) == len(known) and all(map(operator.is_, items, known)):
                return known
        self._known.append(items)
        return items


class _PlainItems:
    """Returns the numbers and texts in a list or dict; () where it has the length `besides`."""

    def __init__(self, besides: int = -1) -> None:
        self._besides = besides
        self._known = _Known()

    def __call__(self, value: Any) -> tuple[Any, ...]:
        if len(value) == self._besides:
            return ()
        items: Any = value if isinstance(value, list) else copy_of(value).values()
        # Also numbers of a trace.
        return self._known.of(tuple(item for item in items if isinstance(item, _NUMBERS_AND_TEXTS)))


class _DefinitionsOf:
    """Returns the functions, classes and modules that a dict has under `names`, and the same tuple for the same.

    A pass-through, of a trace in any thread, counts as the function that it replaces.
    """

    def __init__(self, names: list[Any]) -> None:
        self._names = names
        # One name more than there are, so that there is always a tuple.
        self._get = operator.itemgetter(names[0], *names)
        self._known = _Known()
        # What was there at the last call, and what that has replaced.
        self._latest: tuple[tuple[Any, ...], tuple[Any, ...]] = ((), ())

    def __call__(self, value: Mapping[Any, Any]) -> tuple[Any, ...]:
        try:
            items = self._get(value)
        except KeyError:
            items = tuple(value.get(name, NO_VALUE) for name in self._names)
        before, originals = self._latest
        if len(items) != len(before) or not all(map(operator.is_, items, before)):
            originals = self._known.of(tuple(map(original_of, items)))
            self._latest = (items, originals)
        return originals


class Variable(Holder):
    """A variable of a function around another one, to which that one may assign."""

    def __init__(self, variable: tuple[str, CellType]) -> None:
        self._name, self._cell = variable
        super().__init__(self._cell)

    def _now(self) -> dict[Any, Any]:
        return {self._name: contents_of_cell(self._cell)}

    def readers(self) -> Iterator[tuple[tuple[int, Any], Callable[[Any], Any], Any]]:
        """Yield the place of the variable and what reads it; nothing where it holds a definition."""
        if type(contents_of_cell(self._cell)) not in _DEFINITIONS:
            yield (id(self._cell), self._name), contents_of_cell, self._cell

    def is_untouched(self) -> bool:
        """Say whether it holds what it held."""
        return contents_of_cell(self._cell) is self._before[self._name]

    def _put(self, key: Any, item: Any) -> None:
        if item is NO_VALUE:
            del self._cell.cell_contents
        else:
            self._cell.cell_contents = item


class ContextValue(Holder):
    """The value of a context variable in the context of this thread."""

    def _now(self) -> dict[Any, Any]:
        return {self.value.name: self._current()}

    def may_be_read_by(self, code: CodeType, namespace: Mapping[str, Any], key: Any) -> bool:
        """Say whether code may read a context variable."""
        return "get" in code.co_names

    def _current(self) -> Any:
        try:
            return self.value.get()
        except LookupError:  # it has neither a value nor a default
            return NO_VALUE

    def readers(self) -> Iterator[tuple[tuple[int, Any], Callable[[Any], Any], Any]]:
        """Yield nothing: `OuterValues` compares the variables of a context by itself."""
        return iter(())

    def is_untouched(self) -> bool:
        """Say whether it holds what it held."""
        return self._current() is self._before[self.value.name]

    def _put(self, key: Any, item: Any) -> None:
        if item is not NO_VALUE:
            self.value.set(item)


class _EnvironmentVariables(Holder):
    """The environment variables of the process."""

    def __init__(self) -> None:
        # The mapping that os.environ encodes and decodes texts for, which is faster to read.
        super().__init__(getattr(os.environ, "_data", os.environ))

    def readers(self) -> Iterator[tuple[tuple[int, Any], Callable[[Any], Any], Any]]:
        """Yield what reads the names and the values."""
        yield (id(self.value), ENVIRONMENT), _Known().entries_of, self.value


def outside_of_files(namespaces: Iterable[dict[str, Any]]) -> list[Holder]:
    """Return the holders outside of a model's files that code in `namespaces` may set for a call.

    These are the functions of `torch.nn.functional`, and the environment variables where the module `os` is named.
    """
    values = [value for namespace in namespaces for value in namespace.copy().values()]
    names_os = any(value is os or value is os.environ for value in values)
    return [Holder(vars(torch.nn.functional)), *([_EnvironmentVariables()] if names_os else [])]


def _names_in(code: CodeType) -> Iterator[str]:
    """Yield the names and the texts in a piece of code, among them the keys of dicts."""
    yield from (*code.co_names, *code.co_freevars)
    for constant in code.co_consts:
        yield from filter(lambda each: type(each) is str, constant if isinstance(constant, tuple) else (constant,))


def _is_other_plain_value(now: object, before: object) -> bool:
    kinds = (type(now), type(before))
    if kinds == (float, float):
        return True  # computed anew, if perhaps from the same inputs
    return any(kind in _NUMBERS_AND_TEXTS for kind in kinds) and (kinds[0] is not kinds[1] or now != before)
