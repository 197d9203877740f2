"""A set whose last items can be taken out again, for what a run notes of a module that is then kept whole."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

_Item = TypeVar("_Item")


class NotedSet(set[_Item], Generic[_Item]):
    """A set to which items are only added, one by one or several. `mark` costs O(1), and `forget` O(items since)."""

    def __init__(self) -> None:
        super().__init__()
        self._order: list[_Item] = []

    def add(self, item: _Item, /) -> None:
        """Add an item."""
        if item not in self:
            super().add(item)
            self._order.append(item)

    def update(self, *several: Iterable[_Item]) -> None:
        """Add all items of `several`."""
        for items in several:
            for item in items:
                self.add(item)

    def mark(self) -> int:
        """Return what `forget` needs to take out what is added from now on."""
        return len(self._order)

    def forget(self, mark: int) -> None:
        """Take out what was added since `mark`."""
        self.difference_update(self._order[mark:])
        del self._order[mark:]
