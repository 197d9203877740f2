"""Room on Python's stack for modules that are nested deeply: a trace calls more functions for each than a run does."""

from __future__ import annotations

import sys
import threading
from collections.abc import Generator, Iterable
from contextlib import contextmanager

# Calls on the stack for each module that is called inside another one.
_CALLS_OF_ONE_LEVEL = 12
# Levels for which the usual limit, 1000, does in any case.
_USUAL_LEVELS = 25

# The recursion limit is one for all threads: each trace adds what it needs, and takes that away at its end.
_LOCK = threading.Lock()


def nesting_depth_of(paths: Iterable[str]) -> int:
    """Return how many modules lie in one another at most. O(paths)."""
    return 1 + max((path.count(".") for path in paths), default=0)


@contextmanager
def raised_recursion_limit(levels: int) -> Generator[None]:
    """Raise the recursion limit of the process for modules that lie `levels` deep in one another, if they are many."""
    if levels <= _USUAL_LEVELS:
        yield
        return
    added = 0
    try:
        with _LOCK:
            sys.setrecursionlimit(sys.getrecursionlimit() + _CALLS_OF_ONE_LEVEL * levels)
            added = _CALLS_OF_ONE_LEVEL * levels
        yield
    finally:
        with _LOCK:
            sys.setrecursionlimit(sys.getrecursionlimit() - added)
