"""Notice what code around a call that is one node sets for it outside of its arguments, and puts back afterwards.

`with scale(2.0): x = self.child(x)` sets a global, an attribute of a class or a context variable. A graph that calls
`child` as one node does not set it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextvars import ContextVar, copy_context
from operator import is_
from typing import Any

from featx.libraries import is_collecting_variable
from featx.rebuilding import NO_VALUE
from featx.tracing.file_globals.holders import DEFINITIONS, ENVIRONMENT, PLAIN_ITEMS, Holder
from featx.tracing.objects.plain_objects import PLAIN_TYPES

_PLAIN = tuple(PLAIN_TYPES)
# The id of what holds a value, and its key there; None for the length of a list or dict.
_Place = tuple[int, Any]


class OuterValues:
    """The values outside of modules that code around a call may set for it. O(names) to build, and for each check.

    Args:
        holders: globals, classes, dicts, lists, attributes of objects and variables of closures.

    A run in which none of them differs ahead of a call from what it was at the start needs nothing else. Otherwise the
    run is to come again (`is_to_run_again`), and that one separates the values that a call sets itself from those that
    code around it sets for the call. What is put back before forward ends, or is a plain value, is refused in a further
    run. Context variables are refused at once.
    """

    def __init__(self, holders: Iterable[Holder]) -> None:
        self._places: list[_Place] = []
        # What returns each of the values, and what it is called with.
        self._getters: list[Callable[[Any], Any]] = []
        self._keys: list[Any] = []
        for holder in holders:
            for place, getter, key in holder.readers():
                self._places.append(place)
                self._getters.append(getter)
                self._keys.append(key)
        self._initial: list[Any] = []
        # What they were after the last call that is one node, or at the start.
        self._latest: list[Any] = []
        self._variables: dict[ContextVar[Any], Any] = {}
        self._tells_calls_apart = self._have_changed = False
        # What this run has seen to change ahead of calls, by its number, and whether a plain value took its place.
        self._seen: dict[int, bool] = {}
        self._refused: set[int] = set()

    def start(self) -> None:
        """Take the values as they are for those at the start of a run."""
        self._seen, self._have_changed = {}, False
        self._variables = _variables()
        self._initial = self._latest = self._now()

    def changed_for_call(self) -> str | None:
        """Name what has changed since the last call, and is known to matter. Notes what else has changed."""
        for variable, value in _variables().items():
            if value is not self._variables.get(variable, NO_VALUE):
                return f"the context variable '{variable.name}'"
        now = self._now()
        if all(map(is_, now, self._latest)):
            return None
        self._have_changed = True
        for number, (value, before) in enumerate(zip(now, self._latest, strict=True)):
            if _is_other(value, before):
                if number in self._refused:
                    return self._name_of(number)
                self._seen[number] = self._seen.get(number, False) or self._is_plain(number, value)
        return None

    def accept(self) -> None:
        """Take the values as they are now for unchanged: a call that is one node may have set them, and will again."""
        self._variables = _variables()
        if self._tells_calls_apart:
            self._latest = self._now()

    def is_to_run_again(self) -> bool:
        """Say whether a run that is over has seen changes of which a further run must know."""
        if self._have_changed and not self._tells_calls_apart:
            self._tells_calls_apart = True
            return True
        now = self._now()
        found = {
            number
            for number, is_plain in self._seen.items()
            if is_plain or not _is_other(now[number], self._initial[number])
        }
        is_new = not found <= self._refused
        self._refused |= found
        return is_new

    def carry_over(self, earlier: OuterValues) -> None:
        """Take over what `earlier`, which is of the same model, has found out."""
        self._tells_calls_apart = earlier._tells_calls_apart
        refused = {earlier._places[number] for number in earlier._refused}
        self._refused = {number for number, place in enumerate(self._places) if place in refused}

    def _now(self) -> list[Any]:
        return [get(key) for get, key in zip(self._getters, self._keys, strict=True)]

    def _is_plain(self, number: int, value: Any) -> bool:
        key = self._places[number][1]
        return key is PLAIN_ITEMS or (key is not None and isinstance(value, _PLAIN))  # also numbers of a trace

    def _name_of(self, number: int) -> str:
        key = self._places[number][1]
        if key is None or key is PLAIN_ITEMS:
            return "a list or dict in its Python file"
        if key is ENVIRONMENT:
            return "an environment variable"
        if key is DEFINITIONS:
            return "a function or class in its Python file, or of torch.nn.functional"
        return f"{key!r} in its Python file or in a class"


def _is_other(value: Any, before: Any) -> bool:
    return value is not before and not (type(value) in _PLAIN and type(value) is type(before) and value == before)


def _variables() -> dict[ContextVar[Any], Any]:
    return {variable: value for variable, value in copy_context().items() if not is_collecting_variable(variable)}
