"""Keep a trace from advancing the iterators that a model keeps between calls.

A generator cannot be copied, nor put back where it was. What stands in for it during a trace refuses to go on.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from threading import get_ident
from types import BuiltinMethodType
from typing import Any, NoReturn

from featx.tracing.file_globals.holders import Holder
from featx.tracing.file_globals.object_states import is_counter
from featx.tracing.objects.replaced_globals import ReplacedGlobal, original_of
from featx.tracing.signals import UnsupportedSideEffect

_LIBRARIES = frozenset({"builtins", "itertools"})


class KeptIterators:
    """The iterators in the globals, classes, closures, defaults and containers of a model's Python files.

    While they are replaced, each refuses to be advanced in this thread, and is as before in all others. As with other
    pass-throughs, threads that trace share what stands in for one.
    """

    def __init__(self, holders: Iterable[Holder]) -> None:
        holders = list(holders)
        if not any(map(_may_be_iterator, {kind for holder in holders for kind in map(type, holder.items())})):
            holders = []  # mostly
        # One for each iterator, so that code which compares two of them by identity finds what it found before.
        self._made: dict[int, _KeptIterator] = {}
        self._holders: list[Holder] = []
        for holder in holders:
            iterators = list(filter(_is_iterator_of_python, map(original_of, holder.items())))
            self._made.update((id(each), _KeptIterator(each)) for each in iterators if id(each) not in self._made)
            self._holders += [holder] if iterators else []
        # Those in which this trace is counted, once for each place.
        self._entered: list[_KeptIterator] = []
        self._thread = 0

    def replace(self) -> None:
        """Put what refuses in their places, for the run that starts in this thread. O(items beside an iterator)."""
        thread = self._thread = get_ident()

        def stand_in_for(item: Any) -> Any:
            iterator = original_of(item)
            if id(iterator) not in self._made:
                return item
            stand_in = item if type(item) is _KeptIterator else self._made[id(iterator)]
            stand_in.traces[thread] = stand_in.traces.get(thread, 0) + 1
            self._entered.append(stand_in)
            return stand_in

        for holder in self._holders:
            holder.exchange(stand_in_for)

    def put_back(self) -> None:
        """Take away those that no other thread needs. May be called twice."""
        while self._entered:
            self._entered.pop().leave(self._thread)
        for holder in self._holders:
            holder.exchange(_where_needed)


class UncopiedIterator:
    """Takes the place of a generator, or another iterator that cannot be copied, in the copy of a model."""

    def __init__(self, original: Any) -> None:
        self._kind = type(original).__name__

    def __iter__(self) -> UncopiedIterator:
        return self

    def __next__(self) -> Any:
        _refuse(self._kind)

    send = throw = close = lambda self, *args: next(self)


class _KeptIterator(ReplacedGlobal):
    """Stands in for an iterator of a model's Python file, which it refuses to advance in threads that trace.

    Attributes:
        function: the iterator.
        traces: how many traces run in each thread that has any. For all other threads this is the iterator.
    """

    __slots__ = ("traces",)

    def __init__(self, iterator: Iterator[Any]) -> None:
        super().__init__(iterator)
        self.traces: dict[int, int] = {}

    def leave(self, thread: int) -> None:
        """Take note that a trace of a thread is over."""
        left = self.traces.pop(thread, 0) - 1
        if left > 0:
            self.traces[thread] = left

    @property  # of which object has a setter, too
    def __class__(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The class of the iterator, for `isinstance`."""
        return type(self.function)

    def __iter__(self) -> _KeptIterator:
        return self

    def __next__(self) -> Any:
        self._check()
        return next(self.function)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.function, name)
        return partial(self._call, value) if isinstance(value, BuiltinMethodType) else value  # send, throw, close

    def __length_hint__(self) -> int:
        return operator.length_hint(self.function)

    def __eq__(self, other: object) -> bool:
        return bool(self.function == original_of(other))

    def __hash__(self) -> int:
        return hash(self.function)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.function.__reduce_ex__(protocol)  # a copy is one of the iterator, which that may refuse

    def __repr__(self) -> str:
        return repr(self.function)

    def _call(self, method: Callable[..., Any], *args: Any) -> Any:
        self._check()
        return method(*args)

    def _check(self) -> None:
        if get_ident() in self.traces:
            _refuse(type(self.function).__name__)


def _where_needed(item: Any) -> Any:
    return item.function if type(item) is _KeptIterator and not item.traces else item


def _may_be_iterator(kind: type) -> bool:
    return kind is _KeptIterator or (kind.__module__ in _LIBRARIES and issubclass(kind, Iterator))


def _is_iterator_of_python(value: object) -> bool:
    """Say whether a value is a generator or an iterator of Python's own, other than a counter."""
    return _may_be_iterator(type(value)) and not is_counter(value)


def _refuse(kind: str) -> NoReturn:
    raise UnsupportedSideEffect(
        f"forward advances an iterator that is kept between calls ({kind})",
        advice="give forward what the iterator returns as an input",
    )
