"""Keep what many small dicts hold, and put it back."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any


class KeptDicts:
    """The contents of `dicts` as they are now. O(items).

    Two lists for all of them: a copy of each would be thousands of objects for the garbage collector to walk over.
    """

    def __init__(self, dicts: Iterable[dict[str, Any]]) -> None:
        self._dicts = list(dicts)
        self._sizes = list(map(len, self._dicts))
        self._keys: list[str] = []
        for held in self._dicts:
            self._keys += held
        self._values = self._present_values()

    def restore(self) -> None:
        """Let those dicts that hold something else hold again what they held, in the same order."""
        if list(map(len, self._dicts)) == self._sizes and all(map(operator.is_, self._present_values(), self._values)):
            return
        start = 0
        for held, size in zip(self._dicts, self._sizes, strict=True):
            keys, values = self._keys[start : start + size], self._values[start : start + size]
            if len(held) != size or not all(map(operator.is_, held.values(), values)):
                held.clear()
                held.update(zip(keys, values, strict=True))
            start += size

    def _present_values(self) -> list[Any]:
        values: list[Any] = []
        for held in self._dicts:
            values += held.values()
        return values
