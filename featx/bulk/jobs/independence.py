"""Refuse features of which the row of a sample depends on the other samples of its batch, or on chance."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from featx.bulk.jobs.compute import Runner
from featx.bulk.samples.loading import reason_of, stacked
from featx.bulk.storage.formats import Rows
from featx.errors import RequestError
from featx.tree import tensors_in, tree_map

# Batches of one form run the same kernels, so that a row differs by the order of sums at most.
_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4}
_TOLERANCE_OF_SHORT = 2e-2
_WAY_OUT = "extract(..., check_rows=False), on the command line --any-rows, writes them as they come"


def features_of_one(runner: Runner, sample: Any) -> Rows:
    """Return the features of a batch of one, of a model that takes batches of two.

    Raises:
        RequestError: it raises for one sample.
    """
    try:
        return runner.features(stacked([sample]))
    except Exception as error:  # the model's own
        raise RequestError(
            f"the model takes two samples and not one ({reason_of(error)}), so that features depend on the other "
            f"samples of a batch, as after a batch norm without running statistics. {_WAY_OUT}"
        ) from error


def refuse_dependent_rows(runner: Runner, sample: Any, first: Rows) -> None:
    """Compare the features of a sample beside itself, `first`, with a second run, and with those beside another one.

    The other sample is made of the first one, and stands after it and before it: what a model accumulates along the
    batch reaches later samples alone. Where the model does not take it, that is not compared. Cost: five runs of two
    samples.

    Raises:
        RequestError: they differ by more than rounding.
    """
    again = runner.features(stacked([sample, sample]))
    _compare(runner, first, again, 0, "is another one each time that it is computed for one input: the model draws "
             "random numbers, or keeps state; put it into eval mode, or change that")  # fmt: skip
    for other in _others_like(sample):
        for row, batch in enumerate(([sample, other], [other, sample])):
            try:
                beside_another = runner.features(stacked(batch))
            except Exception:  # the model's own, or a check of a value
                continue
            _compare(runner, first, beside_another, row, "depends on the other samples of a batch, as after a batch "
                     "norm without running statistics, so that it would depend on how many there are")  # fmt: skip


def _compare(runner: Runner, first: Rows, other: Rows, row: int, what: str) -> None:
    for column in runner.columns:
        if not _is_same_row(first[column.name][row], other[column.name][row]):
            raise RequestError(f"what '{column.name}' is for a sample {what}. {_WAY_OUT}")


def _others_like(sample: Any) -> Iterator[Any]:
    """Yield a sample with smaller values and one with larger ones. Masks stay as they are, but beside nothing else."""
    keeps_masks = not all(map(_is_mask, tensors_in(sample)))
    for change in (_smaller, _larger):
        yield tree_map(lambda leaf, change=change: _changed(leaf, change, keeps_masks), sample)


def _changed(leaf: Any, change: Callable[[torch.Tensor], torch.Tensor], keeps_masks: bool) -> Any:
    if not isinstance(leaf, torch.Tensor) or not leaf.numel() or (keeps_masks and _is_mask(leaf)):
        return leaf
    if leaf.is_floating_point() and leaf.min() == leaf.max():  # a black image
        leaf = leaf + torch.linspace(0, 1, leaf.numel()).to(leaf).view_as(leaf)
    return change(leaf)


def _smaller(values: torch.Tensor) -> torch.Tensor:
    """Return smaller floating-point numbers, and one integer of the sample in all places."""
    return _turned(values) * 0.5 if values.is_floating_point() else values.flatten()[0].expand_as(values).clone()


def _larger(values: torch.Tensor) -> torch.Tensor:
    """Return larger floating-point numbers, integers in another order, and the contrary of truth values."""
    if values.dtype is torch.bool:
        return ~values
    return _turned(values) * 2 if values.is_floating_point() else _turned(values)


def _turned(values: torch.Tensor) -> torch.Tensor:
    return values.flip(-1) if values.dim() else values


def _is_mask(values: torch.Tensor) -> bool:
    return bool(((values == 0) | (values == 1)).all())


def _is_same_row(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Say whether the features of a sample are the same, but for rounding."""
    values = one, other
    if values[0].shape != values[1].shape or values[0].dtype != values[1].dtype:
        return False
    if not values[0].is_floating_point():
        return torch.equal(*values)
    tolerance = _TOLERANCES.get(values[0].dtype, _TOLERANCE_OF_SHORT)
    largest = values[0].abs().nan_to_num(0.0, 0.0, 0.0).max() if values[0].numel() else 0.0
    return torch.allclose(*values, rtol=tolerance, atol=tolerance * float(largest), equal_nan=True)
