"""Notice what code around a call that is one node sets for it outside of its arguments, and puts back afterwards.

`with scale(2.0): x = self.child(x)` sets a global, an attribute of a class or a context variable. A graph that calls
`child` as one node does not set it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextvars import ContextVar, copy_context
from itertools import chain
from operator import is_
from typing import Any

from featx.libraries import is_collecting_variable
from featx.rebuilding import NO_VALUE
from featx.tracing.file_globals.holders import Holder, Together
from featx.tracing.objects.plain_objects import PLAIN_TYPES

_PLAIN = tuple(PLAIN_TYPES)
# Which values are compared, and not just whether they are one object.
_COMPARED = PLAIN_TYPES | {frozenset}
# The id of what holds a value, and its key there.
_Place = tuple[int, Any]
# What each holder holds at one moment.
_Snapshot = list[dict[Any, Any]]


class OuterValues:
    """The values outside of modules that code around a call may set for it. O(names) to build, and for each check.

    Args:
        holders: globals, classes, dicts, lists, attributes of objects and variables of closures.

    A run in which none of them differs before a call from what it was at the start needs nothing else. Otherwise the
    run is to come again (`learn_from_run`), and that one separates the values that a call sets itself from those that
    code around it sets for the call. What is put back before forward ends, or is a plain value, is refused in a further
    run. Context variables are refused at once.
    """

    def __init__(self, holders: Iterable[Holder]) -> None:
        self._holders = [each for each in holders if each.outer_values(each.now())]
        # Yield the values of most holders as they are at the time; the other holders, by their places.
        self._live: list[Iterable[Any]] = []
        self._others: list[int] = []
        for place, holder in enumerate(self._holders):
            values = holder.live_values()
            if values is None:
                self._others.append(place)
            else:
                self._live.append(values)
        self._initial: _Snapshot = []
        # What they held after the last call that is one node, or at the start; and the same values in one list.
        self._latest: _Snapshot = []
        self._latest_values: list[Any] | None = None
        self._variables: dict[ContextVar[Any], Any] = {}
        self._tells_calls_apart = self._have_changed = False
        # What this run has seen to change before calls, and whether a plain value took its place.
        self._seen: dict[_Place, bool] = {}
        self._refused: set[_Place] = set()

    def start(self) -> None:
        """Take the values as they are for those at the start of a run."""
        self._seen, self._have_changed = {}, False
        self._variables = _variables()
        self._initial = self._latest = self._now()
        self._latest_values = self._values()

    def changed_for_call(self) -> str | None:
        """Name what has changed since the last call, and is known to matter. Notes what else has changed."""
        for variable, value in _variables().items():
            if value is not self._variables.get(variable, NO_VALUE):
                return f"the context variable '{variable.name}'"
        if self._are_as_latest():  # mostly
            return None
        for place, value in self._changes_since(self._latest):
            self._have_changed = True
            if place in self._refused:
                return _name_of(place)
            self._seen[place] = self._seen.get(place, False) or _is_plain(place, value)
        return None

    def accept(self) -> None:
        """Take the values as they are now for unchanged: a call that is one node may have set them, and will again."""
        self._variables = _variables()
        if self._tells_calls_apart:
            self._latest, self._latest_values = self._now(), self._values()

    def learn_from_run(self) -> bool:
        """Take over what a run that is over has seen; say whether a further run must know of it."""
        if self._have_changed and not self._tells_calls_apart:
            self._tells_calls_apart = True
            return True
        still_changed = {place for place, _ in self._changes_since(self._initial)}
        found = {place for place, is_plain in self._seen.items() if is_plain or place not in still_changed}
        is_new = not found <= self._refused
        self._refused |= found
        self._initial, self._latest, self._latest_values = [], [], None  # they may keep tensors of the run
        return is_new

    def carry_over(self, earlier: OuterValues) -> None:
        """Take over what `earlier`, which is of the same model, has found out."""
        self._tells_calls_apart = earlier._tells_calls_apart
        known = {id(holder.value) for holder in self._holders}
        self._refused = {place for place in earlier._refused if place[0] in known}

    def _now(self) -> _Snapshot:
        return [holder.now() for holder in self._holders]

    def _values(self) -> list[Any] | None:
        """Return what most of them hold, in one list; None where another thread changes it meanwhile. O(names)."""
        try:
            return list(chain.from_iterable(self._live))
        except RuntimeError:  # another thread has added to one of them
            return None

    def _are_as_latest(self) -> bool:
        """Say whether all hold the very values of `_latest`. O(names), and fast."""
        now, latest = self._values(), self._latest_values
        if now is None or latest is None or len(now) != len(latest) or not all(map(is_, now, latest)):
            return False
        return all(self._holders[place].holds(self._latest[place]) for place in self._others)

    def _changes_since(self, earlier: _Snapshot) -> Iterator[tuple[_Place, Any]]:
        """Yield the place and the value of what is another one now than in an earlier snapshot."""
        for holder, before in zip(self._holders, earlier, strict=True):
            if holder.holds(before):
                continue
            values_before = holder.outer_values(before)
            for key, value in holder.outer_values(holder.now()).items():
                if _is_other(value, values_before[key]):
                    yield (id(holder.value), key), value


def _is_plain(place: _Place, value: Any) -> bool:
    _, key = place
    if isinstance(key, Together):
        return key is Together.PLAIN_ITEMS
    return isinstance(value, _PLAIN)  # also numbers of a trace


def _name_of(place: _Place) -> str:
    _, key = place
    return key.value if isinstance(key, Together) else f"{key!r} in its Python file or in a class"


def _is_other(value: Any, before: Any) -> bool:
    if type(value) is tuple and type(before) is tuple:
        return len(value) != len(before) or not all(map(is_, value, before))
    return value is not before and not (type(value) in _COMPARED and type(value) is type(before) and value == before)


def _variables() -> dict[ContextVar[Any], Any]:
    return {variable: value for variable, value in copy_context().items() if not is_collecting_variable(variable)}
