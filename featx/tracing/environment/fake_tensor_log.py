"""Keep what torch logs of failed runs on fake tensors out of the terminal, where such a failure is expected."""

from __future__ import annotations

import logging
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar

_IS_EXPECTED: ContextVar[bool] = ContextVar("featx_expects_failures_on_fake_tensors", default=False)


class _WithoutExpected(logging.Filter):
    """Drops records of exceptions that are raised where they are expected: who catches them knows of them."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not (record.exc_info and _IS_EXPECTED.get())


_FILTER = _WithoutExpected()


@contextmanager
def failures_expected() -> Generator[None]:
    """Let torch log nothing of exceptions on fake tensors inside, in this thread.

    It logs the traceback of each at ERROR. The filter that the logger gets stays there, and drops nothing of other
    threads, or afterwards: taking it away would race with threads that log meanwhile.
    """
    logging.getLogger("torch._subclasses.fake_tensor").addFilter(_FILTER)
    token = _IS_EXPECTED.set(True)
    try:
        yield
    finally:
        _IS_EXPECTED.reset(token)
