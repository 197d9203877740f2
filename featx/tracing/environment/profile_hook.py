"""Observe all calls of a thread, to Python and to C functions, with `sys.setprofile`."""

from __future__ import annotations

import queue
import sys
import threading
from _queue import SimpleQueue
from collections.abc import Callable, Sequence
from types import FrameType, FunctionType, ModuleType
from typing import Any

from featx.tracing.environment.other_threads import is_only_thread

# Gets the frame, the event ("call", "c_call" or the end of one), and with "c_call" what is called: `sys.setprofile`.
ProfileCallback = Callable[[FrameType, str, Any], None]

# Calls that give work to another thread. Pools, events, barriers and semaphores use them too.
_NOTIFY = threading.Condition.notify.__code__
_DELEGATING_CODE = {threading.Thread.start.__code__, queue.Queue.put.__code__, _NOTIFY}
_LIBRARIES = ("concurrent.futures.", "multiprocessing.")
# Python modules in them that only tell something, as each record of `logging` asks for the name of the process. A
# process that is started runs code of others of them too.
_TELLING = frozenset({"multiprocessing.process", "multiprocessing.context"})
# Code that hands work over names something of these Python modules, mostly.
_OF_WORKERS = frozenset(
    {"threading", "_thread", "queue", "_queue", "concurrent", "multiprocessing", "asyncio", "joblib"}
)


class ProfileHook:
    """Hands each call of the thread that starts this to `listeners`. Python code takes two to four times as long."""

    def __init__(self, listeners: Sequence[ProfileCallback]) -> None:
        self._listeners = listeners
        self._callback = listeners[0] if len(listeners) == 1 else self._dispatch

    def start(self) -> bool:
        """Call the listeners from now on, if there are any. Return whether that is so: a profiler may have the hook."""
        if not self._listeners or sys.getprofile() is not None:
            return False
        sys.setprofile(self._callback)
        return True

    def stop(self) -> None:
        """Listen no more. May be called twice."""
        if sys.getprofile() == self._callback:
            sys.setprofile(None)

    def _dispatch(self, frame: FrameType, event: str, called: Any) -> None:
        for listener in self._listeners:
            listener(frame, event, called)


def is_threading_object(value: Any) -> bool:
    """Say whether a value is a Python module of threads or processes, of one, or an object of such a class."""
    if isinstance(value, ModuleType):
        return value.__name__.removeprefix("torch.").partition(".")[0] in _OF_WORKERS
    kind: Any = value if isinstance(value, (type, FunctionType)) else type(value)
    return str(kind.__module__).partition(".")[0] in _OF_WORKERS


def delegates_work(frame: FrameType, event: str, called: Any) -> bool:
    """Say whether a call hands work, or a result, to another thread or process. A record of `logging` is neither."""
    if event == "call":
        name = str(frame.f_globals.get("__name__"))
        is_one = frame.f_code in _DELEGATING_CODE or (name.startswith(_LIBRARIES) and name not in _TELLING)
        if frame.f_code is _NOTIFY and is_only_thread():  # it wakes nobody, as in the lock of a file
            return False
    else:
        is_one = event == "c_call" and called.__name__ == "put" and isinstance(called.__self__, SimpleQueue)
    return is_one and not _is_logging(frame)


def _is_logging(frame: FrameType | None) -> bool:
    """Say whether a frame is of `logging`, or is called by it: a handler may put records into a queue."""
    while frame is not None:
        if str(frame.f_globals.get("__name__")).partition(".")[0] == "logging":
            return True
        frame = frame.f_back
    return False
