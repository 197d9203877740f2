"""Measure how many samples should run at once."""

from __future__ import annotations

import time
from typing import Any

import torch

from featx.bulk.jobs.compute import Runner
from featx.bulk.jobs.memory import free_memory, most_memory
from featx.bulk.samples.loading import stacked

# When no larger batch is tried: so much slower is it, for each sample, than the best; or it takes so long.
_SLOWER, _SECONDS_OF_BATCH, _LARGEST_BATCH = 1.3, 0.7, 256
# What takes longer is not timed a second time.
_SECONDS_OF_TRIAL = 0.1


def find_batch_size(runner: Runner, example: Any) -> tuple[int, float]:
    """Return how many samples should run at once, and how many seconds one of them takes then.

    It is that of 1, 4, 16, 64 and 256 of which one sample takes the least time, as far as the memory of the machine and
    of its GPU goes. Where single samples are not run, it is none of 1.
    """
    times: dict[int, float] = {}
    size = 1 if runner.fewest == 1 else 4
    while size <= _LARGEST_BATCH:
        before = most_memory()
        try:
            times[size] = seconds_of_sample(runner, example, size)
        except (torch.OutOfMemoryError, MemoryError):
            break
        is_slow = times[size] * size > _SECONDS_OF_BATCH or times[size] > _SLOWER * min(times.values())
        # The next batch takes four times as much, and the processes that read hold a few of them.
        if is_slow or 4 * (most_memory() - before) > free_memory() / 2:
            break
        size *= 4
    best = min(times, key=times.__getitem__, default=runner.fewest)
    return best, times.get(best, 1.0)


def seconds_of_sample(runner: Runner, example: Any, count: int) -> float:
    """Return the seconds that one of `count` samples takes, which run at once."""
    batch = stacked([example] * count)
    times: list[float] = []
    while len(times) < 3 and not (times and times[-1] > _SECONDS_OF_TRIAL):
        start = time.perf_counter()
        runner.features(batch)
        times.append(time.perf_counter() - start)
    return min(times) / count
