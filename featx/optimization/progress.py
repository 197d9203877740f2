"""Show what is tried, in one line on the standard error stream."""

from __future__ import annotations

import sys
import time


class Progress:
    """A line that says what is tried, for how long already, and what was gained.

    Args:
        budget: the seconds that there are.
        is_shown: whether anything is printed. A stream that is no terminal gets a line for each thing.
    """

    def __init__(self, budget: float, *, is_shown: bool) -> None:
        self._start = time.perf_counter()
        self._budget = budget
        self._is_shown = is_shown
        self._is_terminal = is_shown and sys.stderr.isatty()

    def show(self, what: str, ratio: float) -> None:
        """Say that something is tried, and how much of the time is needed by now."""
        if self._is_shown:
            seconds = time.perf_counter() - self._start
            text = f"optimize: {seconds:.0f} of {self._budget:.0f} s, {ratio:.2f} of the time; trying {what}"
            start, end = ("\r\x1b[2K", "") if self._is_terminal else ("", "\n")
            print(start + text, end=end, file=sys.stderr, flush=True)  # noqa: T201 - this is what it is for

    def close(self) -> None:
        """Clear the line."""
        if self._is_terminal:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)  # noqa: T201 - this is what it is for
