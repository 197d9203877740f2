"""Sets and queues outside of a model's modules, and what was in them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from operator import is_
from typing import Any

from featx.tracing.objects.containers import LARGE


class Members:
    """A set or a `collections.deque`, and what was in it.

    What a call leaves there is taken away behind it. The next call on the same replica, which is compared with the
    first one, finds it there (`put`): code that asks whether it has seen a size before does something else then, and a
    warning that is given once does not matter.

    Attributes:
        left: what the last call has left there; None where it was as before.
    """

    def __init__(self, value: set[Any] | deque[Any]) -> None:
        self.value = value
        self._before = value.copy()
        self.left: list[Any] | None = None

    def is_untouched(self) -> bool:
        """Say whether it holds what it held."""
        now, before = self.value, self._before
        if isinstance(now, set):
            return now == before
        return len(now) == len(before) and all(map(is_, now.copy(), before))  # tensors are not compared by value

    def restore(self) -> bool:
        """Let it hold what it held, and say whether it did not. May be called twice."""
        if self.is_untouched():
            return False
        self.left = list(self.value.copy())  # at once: other threads may add items meanwhile
        self._refill(self._before)
        return True

    def put(self) -> None:
        """Let it hold what the last call has left there."""
        if self.left is not None:
            self._refill(self.left)

    def forget(self) -> None:
        """Forget what the last call has left."""
        self.left = None

    def readers(self) -> Iterator[tuple[tuple[int, Any], Callable[[Any], Any], Any]]:
        """Yield the place of its length and what reads it, with an argument; nothing where it is large."""
        if len(self.value) <= LARGE:
            yield (id(self.value), None), len, self.value

    def _refill(self, items: Iterable[Any]) -> None:
        if isinstance(self.value, set):
            items = set(items)
            self.value -= self.value - items
            self.value |= items
        else:
            self.value.clear()
            self.value.extend(items)
