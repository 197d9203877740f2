"""What a trace on real tensors has read of values, so that a trace without values may be told."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

from featx.tracing.signals import Diverged, NeedsRealValues


class ValueLog:
    """The answers that one trace got to its questions for values, in order, by the names of the questions."""

    def __init__(self) -> None:
        self.given: list[tuple[str, Any]] = []
        self._expected: deque[tuple[str, Any]] = deque()

    def expect(self, earlier: Iterable[tuple[str, Any]]) -> None:
        """Answer, from now on, what an earlier trace was answered. The graph will check that it is the same."""
        self._expected = deque(earlier)

    @property
    def are_expected(self) -> bool:
        """Whether there are answers of an earlier trace left."""
        return bool(self._expected)

    def note(self, name: str, answer: Any) -> None:
        """Keep an answer for a later trace."""
        self.given.append((name, answer))

    def next(self, name: str) -> Any:
        """Return what the earlier trace was answered to its next question.

        Raises:
            NeedsRealValues: there is none.
            Diverged: it asked something else.
        """
        if not self._expected:
            raise NeedsRealValues
        asked, answer = self._expected.popleft()
        if asked != name:
            raise Diverged
        return answer
