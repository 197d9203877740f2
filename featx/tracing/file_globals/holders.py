"""Dicts, lists, classes and variables of closures outside of a model's modules, and what was in them."""

from __future__ import annotations

import builtins
import functools
import operator
import os
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from enum import Enum
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, ModuleType
from typing import Any

import torch

from featx.rebuilding import NO_VALUE, contents_of_cell
from featx.tracing.objects.containers import LARGE, containers_in, differences, items_by_key, methods_of
from featx.tracing.objects.plain_objects import VALUES, is_plain_object, is_plain_value
from featx.tracing.objects.replaced_globals import original_of

# The types of plain values, with which code counts or switches between what it does.
_NUMBERS_AND_TEXTS = (bool, int, float, complex, str, bytes)
# What holds items one after the other, and what holds items alone.
_IN_ORDER = (list, deque)
_PLAIN = (list, deque, set)
# What code defines once.
_DEFINITIONS = frozenset(
    {
        FunctionType, BuiltinFunctionType, functools._lru_cache_wrapper, ModuleType, type, staticmethod, classmethod,
        property,
    }
)  # fmt: skip


class Together(Enum):
    """The keys of what several items of a holder are together, with what messages call them."""

    ITEMS = "a list or dict in its Python file"
    PLAIN_ITEMS = "a number or text in a list or dict in its Python file"
    DEFINITIONS = "a function or class in its Python file, or of torch.nn.functional"
    ENVIRONMENT = "an environment variable"


class Holder:
    """A dict, a set, a list, a deque or a class, and what was in it.

    Attributes:
        value: that container or class.
    """

    def __init__(self, value: Any) -> None:
        self.value = value
        self._before = self.now()
        # What it held when plain values were accepted last.
        self._accepted: dict[Any, Any] | None = None

    def now(self) -> dict[Any, Any]:
        """Return what it holds, by key or place."""
        return dict(vars(self.value)) if isinstance(self.value, type) else items_by_key(self.value)

    def live_values(self) -> Iterable[Any] | None:
        """Return what yields the values that it holds at the time, again and again; None for a single variable."""
        if isinstance(self.value, type):
            return vars(self.value).values()
        if isinstance(self.value, _PLAIN):
            return self.value
        return dict.values(self.value) if isinstance(self.value, dict) else None

    def items_of(self, kinds: Collection[type]) -> list[tuple[Any, Any]]:
        """Return what it held of some classes, with keys or places."""
        return [(key, item) for key, item in self._before.items() if type(item) in kinds]

    def items(self) -> Collection[Any]:
        """Return what it held."""
        return self._before.values()

    def replaced(self, now: Mapping[Any, Any]) -> dict[Any, Any]:
        """Return the constants and plain objects among what it holds `now` that are others than before, by key."""
        changed = differences(self._before, now)
        return {
            key: item
            for key, before, item in changed
            if _is_other_constant(item, before) or _is_other_object(item, before)
        }

    def had(self, key: Any) -> bool:
        """Say whether it held something at that key or place."""
        return key in self._before

    def is_untouched(self) -> bool:
        """Say whether it holds what it held."""
        return self.holds(self._before)

    def holds(self, items: dict[Any, Any]) -> bool:
        """Say whether it holds these very items, which `now` gave."""
        now = vars(self.value) if isinstance(self.value, type) else self.value
        if len(now) != len(items):
            return False
        # A list, as another thread may add to it meanwhile.
        values = list(now if isinstance(now, _PLAIN) else dict.values(now) if isinstance(now, dict) else now.values())
        return len(values) == len(items) and all(map(operator.is_, values, items.values()))

    def outer_values(self, now: Mapping[Any, Any]) -> dict[Any, Any]:
        """Return the values among what this holds `now` that code may set and put back, by key; none of a large one.

        The items of a list are one value; so are the number of items in a dict, the numbers and texts in either, of
        which there may be more later, and all definitions. A pass-through, of a trace in any thread, counts as the
        function that it replaces.
        """
        is_namespace = isinstance(self.value, type) or "__builtins__" in self._before
        if len(self._before) > LARGE and not is_namespace:
            return {}
        plain = tuple(item for item in now.values() if isinstance(item, _NUMBERS_AND_TEXTS))  # also those of a trace
        if isinstance(self.value, _PLAIN):
            return {Together.ITEMS: tuple(map(original_of, now.values())), Together.PLAIN_ITEMS: plain}
        found: dict[Any, Any] = {}
        definitions: list[Any] = []
        for key, item in self._before.items():
            # What a trace, of whatever thread, lays over functions can be called too.
            if type(item) in _DEFINITIONS or (is_namespace and callable(item)):
                # A trace lays functions over builtins, too, and takes them away again.
                if not is_namespace or not (key.startswith("__") or key in vars(builtins)):
                    definitions.append(original_of(now.get(key)))
            elif not (is_namespace and key.startswith("__")):
                found[key] = original_of(now.get(key))
        if not is_namespace:  # the items that are replaced have places of their own
            found[Together.ITEMS] = len(now)
            found[Together.PLAIN_ITEMS] = plain if len(now) != len(self._before) else ()
        return {**found, Together.DEFINITIONS: tuple(definitions)}

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
            self._accepted = self.now()

    def _changed_since(self, before: dict[Any, Any]) -> list[Any]:
        changed = differences(before, self.now())
        return [key for key, then, now in changed if _is_other_plain_value(now, then)]

    def restore(self, holds_of_trace: Callable[[Any], bool], *, keeps_added: bool) -> dict[Any, Any]:
        """Put back what was there where a plain value changed, or where a tensor or something of a trace is now.

        Args:
            holds_of_trace: says whether a value holds something of a trace.
            keeps_added: keep None and tuples at new keys: another thread may have added them.

        Returns:
            What has taken the place of a tensor, of None or of a tuple of plain values, what holds something of a
            trace, None and such tuples, and objects in the place of others of their class; `NO_VALUE` where something
            is gone. Numbers and texts are left out.
        """
        if self.is_untouched():
            return {}
        now, self._accepted = self.now(), None
        changed = ((key, item, self._before.get(key)) for key, item in now.items())
        left = {
            key: item
            for key, item, before in changed
            if item is not before and (isinstance(before, torch.Tensor) or holds_of_trace(item))
        }
        left |= {key: item for key, item in self.replaced(now).items() if self.had(key) or not keeps_added}
        keys = {*left, *self._changed_since(self._before)}
        if isinstance(self.value, _IN_ORDER):
            if keys:
                items = self._items_without(keys, now)
                methods_of(self.value).clear(self.value)
                methods_of(self.value).extend(self.value, items)
            return left
        for key in keys:
            self._put(key, self._before.get(key, NO_VALUE))
        return left

    def _items_without(self, places: Collection[int], now: dict[int, Any]) -> list[Any]:
        """Return the items of a list as they were, and those that another thread has appended meanwhile."""
        before = list(self._before.values())
        if any(place not in places and now.get(place) is not item for place, item in enumerate(before)):
            return before  # items were inserted or removed
        return before + [item for place, item in now.items() if place >= len(before) and place not in places]

    def put(self, items: dict[Any, Any]) -> None:
        """Put items there, or nothing for `NO_VALUE`; what stood after the end of a list comes to its end."""
        for key, item in items.items():
            if item is NO_VALUE:
                continue
            if isinstance(self.value, _IN_ORDER) and key >= len(self._before):
                methods_of(self.value).append(self.value, item)
            else:
                self._put(key, item)
        for key in reversed([key for key, item in items.items() if item is NO_VALUE]):  # from the end of a list
            self._put(key, NO_VALUE)

    def replace(self, key: Any, item: Any) -> None:
        """Put an item there, and take it for what was there before."""
        self._put(key, item)
        self._before[key] = item

    def exchange(self, other: Callable[[Any], Any]) -> None:
        """Put what `other` returns for an item in its place, where that is another object. O(items)."""
        for key, item in self.now().items():
            new = other(item)
            if new is not item:
                if isinstance(self.value, set):
                    self._drop(key)
                self._put(key, new)

    def _put(self, key: Any, item: Any) -> None:
        if item is NO_VALUE:
            self._drop(key)
        elif isinstance(self.value, type):
            setattr(self.value, key, item)
        elif isinstance(self.value, set):
            set.add(self.value, item)
        else:
            methods_of(self.value).__setitem__(self.value, key, item)

    def _drop(self, key: Any) -> None:
        if key not in self.now():  # another thread has taken it away
            return
        if isinstance(self.value, type):
            delattr(self.value, key)
        elif isinstance(self.value, set):
            set.discard(self.value, key)
        else:
            methods_of(self.value).__delitem__(self.value, key)


class Variable(Holder):
    """A variable of a function around another one, to which that one may assign."""

    def __init__(self, variable: tuple[str, CellType]) -> None:
        self._name, self._cell = variable
        super().__init__(self._cell)

    def now(self) -> dict[Any, Any]:
        """Return what it holds, by its name."""
        return {self._name: contents_of_cell(self._cell)}

    def outer_values(self, now: Mapping[Any, Any]) -> dict[Any, Any]:
        """Return the value of the variable; nothing where it held a definition."""
        is_definition = type(self._before[self._name]) in _DEFINITIONS
        return {} if is_definition else {key: original_of(value) for key, value in now.items()}

    def holds(self, items: dict[Any, Any]) -> bool:
        """Say whether it holds this very value, which `now` gave."""
        return contents_of_cell(self._cell) is items[self._name]

    def _put(self, key: Any, item: Any) -> None:
        if item is NO_VALUE:
            del self._cell.cell_contents
        else:
            self._cell.cell_contents = item


class Defaults(Holder):
    """The defaults of a function, by their places."""

    def now(self) -> dict[Any, Any]:
        """Return the defaults, by their places."""
        return dict(enumerate(self.value.__defaults__ or ()))

    def outer_values(self, now: Mapping[Any, Any]) -> dict[Any, Any]:
        """Return nothing: no code sets the defaults of a function for a call."""
        return {}

    def holds(self, items: dict[Any, Any]) -> bool:
        """Say whether it holds these very values, which `now` gave."""
        now = self.now()
        return len(now) == len(items) and all(map(operator.is_, now.values(), items.values()))

    def _put(self, key: Any, item: Any) -> None:
        if item is not NO_VALUE:
            self.value.__defaults__ = tuple({**self.now(), key: item}.values())


class ContextValue(Holder):
    """The value of a context variable in the context of this thread."""

    def now(self) -> dict[Any, Any]:
        """Return its value, by its name."""
        return {self.value.name: self._current()}

    def may_be_read_by(self, code: CodeType, namespace: Mapping[str, Any], key: Any) -> bool:
        """Say whether code may read a context variable."""
        return "get" in code.co_names

    def _current(self) -> Any:
        try:
            return self.value.get()
        except LookupError:  # it has neither a value nor a default
            return NO_VALUE

    def outer_values(self, now: Mapping[Any, Any]) -> dict[Any, Any]:
        """Return nothing: `OuterValues` compares the variables of a context by itself."""
        return {}

    def holds(self, items: dict[Any, Any]) -> bool:
        """Say whether it holds this very value, which `now` gave."""
        return self._current() is items[self.value.name]

    def _put(self, key: Any, item: Any) -> None:
        if item is not NO_VALUE:  # which runs leave to the context that they run in
            self.value.set(item)


class _EnvironmentVariables(Holder):
    """The environment variables of the process."""

    def __init__(self) -> None:
        # The mapping that os.environ encodes and decodes texts for, which is faster to read.
        super().__init__(getattr(os.environ, "_data", os.environ))

    def outer_values(self, now: Mapping[Any, Any]) -> dict[Any, Any]:
        """Return the names and the texts, which are other objects when they are set again."""
        return {Together.ENVIRONMENT: frozenset(now.items())}


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


def _is_other_constant(now: object, before: object) -> bool:
    """Say whether None, or a tuple of plain values, has come to a place or gone from it, if no number or text has.

    What was None and is an object now was made at its first use.
    """
    if type(now) in _NUMBERS_AND_TEXTS or type(before) in _NUMBERS_AND_TEXTS:
        return False
    return is_plain_value(now) or (is_plain_value(before) and (before is not None or now is NO_VALUE))


def _is_other_object(now: object, before: object) -> bool:
    """Say whether a list, a dict or a plain object has come to the place of another one of its class, or is gone."""
    if type(before) in _NUMBERS_AND_TEXTS or (now is not NO_VALUE and type(now) is not type(before)):
        return False
    return isinstance(before, (list, tuple, dict, set, frozenset, *VALUES)) or is_plain_object(before)


def _is_other_plain_value(now: object, before: object) -> bool:
    kinds = (type(now), type(before))
    if kinds == (float, float):
        return True  # computed anew, if perhaps from the same inputs
    return any(kind in _NUMBERS_AND_TEXTS for kind in kinds) and (kinds[0] is not kinds[1] or now != before)
