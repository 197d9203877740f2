"""Plan: the batches that are to be read, found as they are needed, and given again after a reader was lost."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator


class Plan:
    """Numbers of samples in batches, in the order in which they are read.

    Iterating over it begins with the first batch that is not finished, each time. A batch is taken from `batches` when
    it is asked for, so that these may become known while earlier ones are read.
    """

    def __init__(self, batches: Iterable[list[int]]) -> None:
        self._rest = iter(batches)
        self._done = 0
        # Those that were asked for, and are not finished.
        self._open: deque[list[int]] = deque()

    def __iter__(self) -> Iterator[list[int]]:
        place = self._done
        while numbers := self._at(place):
            yield numbers
            place += 1

    def first(self) -> list[int]:
        """Return the first batch that is not finished; an empty list where all are."""
        return self._at(self._done)

    def finish_first(self) -> None:
        """Note that the first batch was read."""
        self._open.popleft()
        self._done += 1

    def _at(self, place: int) -> list[int]:
        while len(self._open) <= place - self._done:
            numbers = next(self._rest, None)
            if numbers is None:
                return []
            self._open.append(numbers)
        return self._open[place - self._done]
