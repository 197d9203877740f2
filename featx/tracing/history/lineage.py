"""Which node each object of a running trace comes from, by the identity of the object."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from featx.ir.node import Node


class Part:
    """An item or attribute of the value of a node, which becomes a node of its own when it is first used."""

    __slots__ = ("function", "key", "node", "owner")

    def __init__(self, owner: Origin, function: Callable[..., Any], key: Any) -> None:
        self.owner = owner
        self.function = function
        self.key = key
        self.node: Node | None = None


Origin = Node | Part


def source_node(origin: Origin) -> Node:
    """Return the node that a value is, or is a part of."""
    while isinstance(origin, Part):
        origin = origin.owner
    return origin


class Lineage:
    """Maps objects to where they come from; keeps them alive, so that no id is used again.

    A later entry for an object takes the place of the earlier one: an in-place call returns the object that it got.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[object, Origin]] = {}
        self._earlier: list[tuple[int, tuple[object, Origin] | None]] = []

    def put(self, value: object, origin: Origin) -> None:
        """Note that `value` comes from `origin`."""
        key = id(value)
        self._earlier.append((key, self._entries.get(key)))
        self._entries[key] = (value, origin)

    def get(self, value: object) -> Origin | None:
        """Return where `value` comes from, if that is known."""
        entry = self._entries.get(id(value))
        return None if entry is None else entry[1]

    def mark(self) -> int:
        """Return what `forget` needs to take back everything from now on."""
        return len(self._earlier)

    def forget(self, mark: int) -> None:
        """Take back what was noted since `mark`."""
        while len(self._earlier) > mark:
            key, entry = self._earlier.pop()
            if entry is not None:
                self._entries[key] = entry
            # An entry of an object that is new since stays: it keeps the object alive, and nothing else refers to it.
