"""What tracing tells to the logger "featx": each run of a model at DEBUG, and at INFO what takes long."""

from __future__ import annotations

import logging
import time
from collections.abc import Generator
from contextlib import contextmanager

_LOGGER = logging.getLogger("featx")
# From how many seconds on it is told at INFO how long a trace has taken.
_LONG = 2.0


class RunLog:
    """The runs of one model for one request."""

    def __init__(self) -> None:
        self.runs = 0
        self.runs_for_real = 0

    @contextmanager
    def run(self, name: str, reason: str, *, is_real: bool) -> Generator[None]:
        """Count a run of the model `name`, and log its reason, how it ended and how long it took."""
        self.runs += 1
        self.runs_for_real += is_real
        start, outcome = time.perf_counter(), "done"
        try:
            yield
        except BaseException as error:
            outcome = f"ended with {type(error).__name__}"
            raise
        finally:
            milliseconds = 1e3 * (time.perf_counter() - start)
            how = "with values" if is_real else "without values"
            _LOGGER.debug("%s, run %d, %s: %s, %s, %.1f ms", name, self.runs, how, reason, outcome, milliseconds)

    @contextmanager
    def request(self, name: str) -> Generator[None]:
        """Log, if it takes long, how long the runs inside take together."""
        start, runs, for_real = time.perf_counter(), self.runs, self.runs_for_real
        try:
            yield
        finally:
            seconds = time.perf_counter() - start
            if seconds > _LONG:
                runs, for_real = self.runs - runs, self.runs_for_real - for_real
                _LOGGER.info("tracing %s took %.1f s: %d runs, %d with values", name, seconds, runs, for_real)
