"""Refuse features of which the row of a sample depends on the other samples of its batch, or on chance."""

from __future__ import annotations

from typing import Any

import torch

from featx.bulk.jobs.compute import Runner
from featx.bulk.samples.loading import stacked
from featx.bulk.storage.formats import Rows
from featx.errors import RequestError
from featx.tree import tree_map

# Batches of one form run the same kernels, so that a row differs by the order of sums at most.
_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4}
_TOLERANCE_OF_SHORT = 2e-2
_WAY_OUT = "extract(..., check_rows=False), on the command line --any-rows, writes them as they come"


def refuse_dependent_rows(runner: Runner, sample: Any, first: Rows) -> None:
    """Compare the features of a sample beside itself, `first`, with a second run, and with those beside another one.

    The other sample is made of the first one. Where the model does not take it, that is not compared. Cost: three runs
    of two samples.

    Raises:
        RequestError: they differ by more than rounding.
    """
    again = runner.features(stacked([sample, sample]))
    _compare(runner, first, again, "is another one each time that it is computed for one input: the model draws random "
             "numbers, or keeps state; put it into eval mode, or change that")  # fmt: skip
    for changed in (_smaller, _larger):
        try:
            beside_another = runner.features(stacked([sample, tree_map(changed, sample)]))
        except Exception:  # the model's own, or a check of a value
            continue
        _compare(runner, first, beside_another, "depends on the other samples of a batch, as after a batch norm "
                 "without running statistics, so that it would depend on how many there are")  # fmt: skip


def _compare(runner: Runner, first: Rows, other: Rows, what: str) -> None:
    for column in runner.columns:
        if not _is_same_row(first, other, column.name):
            raise RequestError(f"what '{column.name}' is for a sample {what}. {_WAY_OUT}")


def _smaller(leaf: Any) -> Any:
    """Return smaller floating-point numbers, and one integer of the sample in all places; masks stay as they are."""
    if not isinstance(leaf, torch.Tensor) or not leaf.numel() or _is_mask(leaf):
        return leaf
    return _turned(leaf) * 0.5 if leaf.is_floating_point() else leaf.flatten()[0].expand_as(leaf).clone()


def _larger(leaf: Any) -> Any:
    """Return larger floating-point numbers, and integers in another order; masks stay as they are."""
    if not isinstance(leaf, torch.Tensor) or _is_mask(leaf):
        return leaf
    return _turned(leaf) * 2 if leaf.is_floating_point() else _turned(leaf)


def _turned(values: torch.Tensor) -> torch.Tensor:
    return values.flip(-1) if values.dim() else values


def _is_mask(values: torch.Tensor) -> bool:
    return bool(((values == 0) | (values == 1)).all())


def _is_same_row(one: Rows, other: Rows, name: str) -> bool:
    """Say whether the features of the first sample are the same, but for rounding."""
    values = one[name][0], other[name][0]
    if values[0].shape != values[1].shape or values[0].dtype != values[1].dtype:
        return False
    if not values[0].is_floating_point():
        return torch.equal(*values)
    tolerance = _TOLERANCES.get(values[0].dtype, _TOLERANCE_OF_SHORT)
    largest = values[0].abs().nan_to_num(0.0, 0.0, 0.0).max() if values[0].numel() else 0.0
    return torch.allclose(*values, rtol=tolerance, atol=tolerance * float(largest), equal_nan=True)
