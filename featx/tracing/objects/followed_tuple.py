"""FollowedTuple: a tuple that tells a trace which of its items code takes, and when."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any, Protocol


class Taker(Protocol):
    """What is told of items that are taken."""

    def on_item(self, key: Any, item: Any, frame: FrameType) -> Any:
        """Take note that code at `frame` takes `item` by an index or a slice; return what it gets."""
        ...

    def on_iteration(self, frame: FrameType) -> None:
        """Take note that code at `frame` iterates over the tuple."""
        ...


class FollowedTuple(tuple[Any, ...]):
    """A tuple whose `taker`, if it has one, is told of items that are taken.

    A symbolic trace has a node each time that code takes an item, which counts in the names of nodes. Only code that
    does nothing but take items gets one, since `type(value) is tuple` would be another answer.
    """

    taker: Taker | None = None

    def __getitem__(self, key: Any) -> Any:
        item = super().__getitem__(key)
        return item if self.taker is None else self.taker.on_item(key, item, sys._getframe(1))

    def __iter__(self) -> Iterator[Any]:
        if self.taker is not None:
            self.taker.on_iteration(sys._getframe(1))
        return super().__iter__()


def plain_tuple(value: Any) -> Any:
    """Return a followed tuple as a plain one, and anything else as it is."""
    return tuple(tuple.__iter__(value)) if type(value) is FollowedTuple else value
