"""Measure how much faster something is than something else, and how much its results differ."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import torch

from featx.tree import tree_leaves

_FEWEST_ROUNDS, _MOST_ROUNDS = 5, 60
# Where the fewest rounds take so many times the seconds that are asked for, there are fewer.
_PATIENCE, _FEWEST_ROUNDS_OF_LONG_CALLS = 4, 2


def relative_errors(expected: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, float]:
    """Return the error of each feature: |found - expected| / |expected| in the Euclidean norm, of the worst sample.

    Samples are along the first dimension.
    It is infinite where shapes differ, where a value that is no number of floating point differs, and where infinities
    or NaNs of one are something else in the other.
    """
    return {key: _error(value, found[key]) if key in found else float("inf") for key, value in expected.items()}


def _error(expected: Any, found: Any) -> float:
    one, other = list(tree_leaves(expected)), list(tree_leaves(found))
    if len(one) != len(other):
        return float("inf")
    return max((_error_of_leaf(*pair) for pair in zip(one, other, strict=True)), default=0.0)


def _error_of_leaf(expected: Any, found: Any) -> float:
    if not isinstance(expected, torch.Tensor) or not isinstance(found, torch.Tensor):
        return 0.0 if type(expected) is type(found) and expected == found else float("inf")
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return float("inf")
    if expected.numel() == 0 or torch.equal(expected, found):
        return 0.0
    if not expected.is_floating_point():
        return float("inf")
    one, other = (_rows(value).double() for value in (expected, found))
    where_finite = one.isfinite() & other.isfinite()
    if not torch.allclose(one[~where_finite], other[~where_finite], equal_nan=True):
        return float("inf")
    one, other = (torch.where(where_finite, value, 0.0) for value in (one, other))
    # Squares of very small and very large numbers are 0 and infinite.
    largest = torch.maximum(one.abs(), other.abs()).amax(dim=1, keepdim=True)
    one, other = (value / torch.where(largest == 0, 1.0, largest) for value in (one, other))
    difference, size = (one - other).norm(dim=1), one.norm(dim=1)
    errors = torch.where(difference == 0, 0.0, difference / size)
    return float(errors.max())


def _rows(value: torch.Tensor) -> torch.Tensor:
    return value.reshape(len(value), -1) if value.dim() else value.reshape(1, 1)


def time_in_turn(functions: Sequence[Callable[[], Any]], seconds: float, wait: Callable[[], None]) -> list[float]:
    """Return the median seconds of a call of each function; they are called in turn, for about so many seconds.

    Long calls are made at least twice, and others five times.
    """
    times: list[list[float]] = [[] for _ in functions]
    start = time.perf_counter()

    def is_enough() -> bool:
        rounds, spent = len(times[0]), time.perf_counter() - start
        if rounds < _FEWEST_ROUNDS:
            return rounds >= _FEWEST_ROUNDS_OF_LONG_CALLS and spent > _PATIENCE * seconds
        return rounds >= _MOST_ROUNDS or spent > seconds

    while not is_enough():
        for function, known in zip(functions, times, strict=True):
            known.append(time_once(function, wait))
    return [median(known) for known in times]


def time_once(function: Callable[[], Any], wait: Callable[[], None]) -> float:
    """Return the seconds that one call takes; `wait` waits for the device."""
    wait()
    start = time.perf_counter()
    function()
    wait()
    return time.perf_counter() - start
