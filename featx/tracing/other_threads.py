"""Tell whether other threads may have run since a moment, and so may have changed what all threads share."""

from __future__ import annotations

import threading
import time


def is_only_thread() -> bool:
    """Say whether no other thread of Python exists."""
    return threading.active_count() == 1


class OtherThreads:
    """How much processor time the other threads of this process have used when this is made. A few microseconds.

    In a notebook there are always some, which wait and use none. Threads that only compute for torch count too, but
    not where no other one of Python exists. The frames of the other threads, `sys._current_frames`, would tell more:
    but that call can lock up a process of Python 3.11 for good.
    """

    def __init__(self) -> None:
        self._was_alone = is_only_thread()
        _, self._most = _time_of_others()

    def have_run(self) -> bool:
        """Say whether one of them has run since."""
        if self._was_alone and is_only_thread():
            return False
        least, _ = _time_of_others()
        return least > self._most


def _time_of_others() -> tuple[int, int]:
    """Return between which bounds the time that other threads have used lies, in nanoseconds."""
    before = time.thread_time_ns()
    of_all = time.process_time_ns()
    return of_all - time.thread_time_ns(), of_all - before
