"""Tell whether other threads may have run since a moment, and so may have changed what all threads share."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from typing import Any, cast

# The threads of Python by their numbers. `threading.enumerate` and `active_count` read it under a lock, which an
# interrupt may leave taken; then no thread can start any more.
_ACTIVE: dict[int, threading.Thread] = cast(Any, threading)._active
_HAS_CLOCKS = hasattr(time, "pthread_getcpuclockid")
_TASKS = "/proc/self/task"
# A thread of Python that has ended is one of the system for so long, which looks like one that Python did not start. On
# a busy machine it takes longer, so that is waited for several times.
_SECONDS_TO_END = 0.002
_MOST_WAITS = 25
_HAS_TASKS = os.path.isdir(_TASKS)


def is_only_thread() -> bool:
    """Say whether no other thread of Python exists."""
    return len(_ACTIVE) == 1


class OtherThreads:
    """How much processor time the other threads of Python have used when this is made. A few microseconds.

    In a notebook there are always some, which wait and use none; those in which torch computes do not count. Where the
    system has no clock for each thread (macOS, Windows), the time of the whole process tells, and they do. The frames
    of the other threads, `sys._current_frames`, would say more: but that call can lock up a process of Python 3.11.
    """

    def __init__(self) -> None:
        self._used = _used_by_each()
        self._most = 0 if _HAS_CLOCKS else _used_by_all()[1]

    def have_run(self) -> bool:
        """Say whether one of them has run since, or is new."""
        if not _HAS_CLOCKS:
            return not is_only_thread() and _used_by_all()[0] > self._most
        return not self._used.items() >= _used_by_each().items()


class AllThreads:
    """How much processor time all other threads have used when this is made, those that have ended among them.

    Threads in which torch computes, which Python has not started, do not count where the system tells the time of each
    (Linux): a kernel on a large tensor uses them, and they run on for a while, waiting for the next one. Some
    microseconds for each such thread.
    """

    def __init__(self) -> None:
        self._living = OtherThreads()
        self._known = _tasks()
        self._most = _used_by_all()[1]

    def have_run(self) -> bool:
        """Say whether one of them has run since."""
        # Exact for a thread that was there before and still is; the total is known to ten microseconds or so.
        if self._living.have_run():
            return True
        for _ in range(_MOST_WAITS):
            if _tasks() <= self._known:
                break
            time.sleep(_SECONDS_TO_END)
        # Each answer is a lower bound, and a bad one where this thread had to wait in the middle of it.
        return any(_used_by_all()[0] > self._most for _ in range(3))


def _used_by_each() -> dict[int, int]:
    """Return how many nanoseconds each other thread has run, by its number.

    Those that Python has not started may have ended, and are left out.
    """
    if not _HAS_CLOCKS or is_only_thread():
        return {}
    own = threading.get_ident()
    used: dict[int, int] = {}
    for number, thread in list(_ACTIVE.items()):
        if number == own or isinstance(thread, threading._DummyThread):
            continue
        # A thread takes itself off the list before it ends, for which it needs the interpreter's lock. There is no
        # place between the question and the call at which this thread gives the lock away.
        clock = time.pthread_getcpuclockid(number) if number in _ACTIVE else None
        if clock is not None:
            with suppress(OSError):  # it has ended since: systems differ in the number of the error
                used[number] = time.clock_gettime_ns(clock)
    return used


def _used_by_all() -> tuple[int, int]:
    """Return between which bounds the time that all other threads have used lies, in nanoseconds.

    That of threads which Python has not started is left out as far as the system tells it.
    """
    before = time.thread_time_ns() + _used_by_native()
    of_all = time.process_time_ns()
    return of_all - time.thread_time_ns() - _used_by_native(), of_all - before


def _tasks() -> set[str]:
    return set(os.listdir(_TASKS)) if _HAS_TASKS else set()


def _used_by_native() -> int:
    """Return how many nanoseconds the threads have run that live and that Python has not started; 0 if unknown."""
    of_python = {thread.native_id for thread in list(_ACTIVE.values())} | {threading.get_native_id()}
    used = 0
    for number in map(int, _tasks()):
        if number not in of_python:
            with suppress(OSError):  # it has ended since
                used += time.clock_gettime_ns(~number << 3 | 6)  # Linux' clock of the processor time of a thread
    return used
