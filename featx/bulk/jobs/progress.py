"""Tell how far a job is, on the standard error stream."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


class Progress:
    """A bar with rate, time left, bytes and failures, by tqdm where it is installed; else only what `say` is given.

    Args:
        total: how many samples there are to do.
        is_shown: whether anything is printed.
    """

    def __init__(self, total: int, *, is_shown: bool) -> None:
        self._total = total
        self._is_shown = is_shown
        self._start = time.perf_counter()
        self.samples = self.bytes = self.failures = self.not_finite = 0
        self._bar: Any = None

    def add(self, samples: int, size: int, failures: int, not_finite: int = 0) -> None:
        """Count samples that are written; `not_finite` of them have a NaN or an infinity."""
        self.not_finite += not_finite
        self.samples += samples
        self.bytes += size
        self.failures += failures
        if self._bar is not None:
            self._bar.set_postfix_str(f"{in_units(self.bytes)}, {self.failures} failed", refresh=False)
            self._bar.update(samples)

    def say(self, text: str) -> None:
        """Print a line."""
        if self._is_shown:
            print(text, file=sys.stderr)  # noqa: T201 - this is what it is for

    def summary(self) -> str:
        """Return what was done since the start, in a line."""
        seconds = time.perf_counter() - self._start
        rate = self.samples / seconds if seconds else 0.0
        return (
            f"{self.samples} samples in {seconds:.1f} s ({rate:.1f} a second), {in_units(self.bytes)}, "
            f"{self.failures} failed"
            + (f"; {self.not_finite} have features with NaN or infinity" if self.not_finite else "")
        )

    def __enter__(self) -> Progress:
        if self._is_shown:
            try:
                from tqdm import tqdm  # pyright: ignore[reportMissingModuleSource]
            except ImportError:
                return self
            self._bar = tqdm(total=self._total, unit="sample", file=sys.stderr)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()


def in_units(size: float) -> str:
    """Return a number of bytes as people write it."""
    for unit in _UNITS[:-1]:
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} {_UNITS[-1]}"
