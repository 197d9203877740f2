"""What a trace on real tensors has read of values, so that a trace without values may be told."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from featx.tracing.signals import Diverged, NeedsRealValues


class ValueLog:
    """The answers that one trace got to its questions for values, in order, by the names of the questions."""

    def __init__(self) -> None:
        self.given: list[tuple[str, Any]] = []
        self._expected: list[tuple[str, Any]] = []
        self._taken = 0

    def expect(self, earlier: Iterable[tuple[str, Any]]) -> None:
        """Answer, from now on, what an earlier trace was answered. The graph will check that it is the same."""
        self._expected, self._taken = list(earlier), 0

    @property
    def are_expected(self) -> bool:
        """Whether there are answers of an earlier trace left."""
        return self._taken < len(self._expected)

    def note(self, name: str, answer: Any) -> None:
        """Keep an answer for a later trace."""
        self.given.append((name, answer))

    def next(self, name: str) -> Any:
        """Return what the earlier trace was answered to its next question.

        Raises:
            NeedsRealValues: there is none.
            Diverged: it asked something else.
        """
        if not self.are_expected:
            raise NeedsRealValues
        asked, answer = self._expected[self._taken]
        self._taken += 1
        if asked != name:
            raise Diverged
        return answer

    def mark(self) -> tuple[int, int]:
        """Return what `forget` needs to take back everything from now on."""
        return len(self.given), self._taken

    def forget(self, mark: tuple[int, int]) -> None:
        """Take back the answers since `mark`; those of an earlier trace are given again."""
        given, self._taken = mark
        del self.given[given:]
