"""Time two ways to do one thing, side by side in one process."""

from __future__ import annotations

import gc
import platform
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version


def medians(
    first: Callable[[], object], second: Callable[[], object], rounds: int, *, collector: bool = True
) -> tuple[float, float]:
    """Return the medians, in seconds of process CPU time, of `rounds` runs of each, interleaved.

    With `collector=False` Python's garbage collector is off while they run.
    """
    times: tuple[list[float], list[float]] = ([], [])
    first()
    second()
    for _ in range(rounds):
        for run, results in zip((first, second), times, strict=True):
            gc.collect()
            if not collector:
                gc.disable()
            start = time.process_time()
            run()
            results.append(time.process_time() - start)
            gc.enable()
    return statistics.median(times[0]), statistics.median(times[1])


def describe_machine() -> str:
    """Name what was measured on, in one line."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "torchvision", "timm"))
    return (
        f"{platform.machine()}, Python {platform.python_version()}, {packages}; process CPU time, medians, interleaved"
    )


def print_table(headings: list[str], rows: list[list[str]]) -> None:
    """Print a table in Markdown, aligned."""
    widths = [max(len(row[column]) for row in [headings, *rows]) for column in range(len(headings))]
    for index, row in enumerate([headings, *rows]):
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |")
        if index == 0:
            print("|" + "|".join("-" * (width + 2) for width in widths) + "|")
