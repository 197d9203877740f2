"""Tell whether other threads of Python may have run since a moment, and so may have changed what all threads share."""

from __future__ import annotations

import sys
import threading


def is_only_thread() -> bool:
    """Say whether no other thread of Python exists."""
    return threading.active_count() == 1


class OtherThreads:
    """Where the other threads stand when this is made. A few microseconds.

    In a notebook there are always some, which wait.
    """

    def __init__(self) -> None:
        self._places = _places()

    def have_run(self) -> bool:
        """Say whether one of them has moved since, or is new."""
        return not self._places.items() >= _places().items()


def _places() -> dict[int, tuple[int, int]]:
    own = threading.get_ident()
    frames = sys._current_frames().items()
    return {thread: (id(frame), frame.f_lasti) for thread, frame in frames if thread != own}
