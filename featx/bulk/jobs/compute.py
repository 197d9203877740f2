"""Compute the features of batches; a sample for which the model raises does not take its batch with it."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn

from featx.bulk.samples.loading import reason_of
from featx.bulk.storage.formats import Column, Rows
from featx.errors import ExtractionError, RequestError
from featx.optimization.module import named
from featx.optimization.optimize import apply_recipe, optimize
from featx.optimization.plan import Plan
from featx.tree import tensors_in, tree_map

# Numbers of samples, with their rows; and those that failed, with the reason.
Computed = tuple[list[tuple[list[int], Rows]], list[tuple[int, str]]]


class Runner:
    """Runs an extractor on batches of inputs, without gradients.

    Args:
        extractor: returns a dict of tensors.
        late: what is done to inputs on the device.
        device: where the extractor is.

    Attributes:
        device: as given.
        columns: what each sample gives; `set_columns` finds them.
        fewest: how many samples a batch should have at least: 2 where nobody knows whether the model takes one.
    """

    def __init__(
        self, extractor: nn.Module, late: Callable[[torch.Tensor], torch.Tensor], device: torch.device
    ) -> None:
        self._extractor = extractor
        self._late = late
        self.device = device
        # To which floats are cast; None where the model takes them as they are. An optimized extractor casts its own.
        self._dtype: torch.dtype | None = None
        self.columns: tuple[Column, ...] = ()
        self.fewest = 1
        # Smaller batches are filled up to so many samples, for which code was compiled.
        self._filled_to = 0
        self._most_at_once = sys.maxsize

    def optimization(self, batches: Sequence[Any], tolerance: float, *, is_shown: bool) -> dict[str, Any]:
        """Look for what makes the extractor faster within a tolerance; return the plan as the job file holds it.

        The first batch is timed, and errors count on all of them.
        """
        first, *others = map(self.inputs, batches)
        checks = {f"samples of batch {number}": each for number, each in enumerate(others, 2)}
        plan = optimize(self._extractor, first, tolerance=tolerance, checks=checks, progress=is_shown).plan
        assert plan is not None
        return plan.to_json()

    def optimized(self, plan: Mapping[str, Any], batch_size: int) -> Runner:
        """Return a runner that does what a plan says, on whatever hardware this is."""
        found = Plan.from_json(plan)
        runner = self._like(apply_recipe(self._extractor, found.recipe, found.dtypes), self.device)
        runner._filled_to = batch_size if found.recipe.compile is not None else 0
        return runner

    def moved(self, device: torch.device) -> Runner:
        """Return a runner on a device; another one than now gets a copy of the extractor."""
        return self if device == self.device else self._like(copy.deepcopy(self._extractor).to(device), device)

    def _like(self, extractor: nn.Module, device: torch.device) -> Runner:
        """Return a runner of an extractor that is made of this one's; it takes the same inputs."""
        runner = Runner(extractor, self._late, device)
        runner.columns, runner.fewest = self.columns, self.fewest
        runner._dtype, runner._filled_to = self._dtype, self._filled_to
        return runner

    def inputs(self, batch: Any) -> Any:
        """Return a batch as the extractor takes it."""
        # A copy, on the CPU too: the model may write its input, of which halves are computed where it fails.
        moved = tree_map(
            lambda leaf: leaf.to(self.device, copy=True) if isinstance(leaf, torch.Tensor) else leaf, batch
        )
        if not isinstance(moved, torch.Tensor):
            return moved
        images = self._late(moved)
        return images.to(self._dtype) if self._dtype is not None and images.is_floating_point() else images

    def first_features(self, batch: Any) -> Rows:
        """Return the features of a first batch; where the model does not take it, in the dtype of the weights.

        From then on all batches are cast so.
        """
        try:
            return self.features(batch)
        except Exception:  # the model's own
            self._dtype = other_dtype(self._extractor, self.inputs(batch))
            if self._dtype is None:
                raise
            return self.features(batch)

    def features(self, batch: Any) -> Rows:
        """Return the features of a batch, on the CPU: copies, since the model may write its buffers in the next one."""
        count = _count(batch)
        inputs = self.inputs(_filled(batch, count, self._filled_to))
        with torch.inference_mode():
            if isinstance(inputs, dict):
                found = self._extractor(**cast("dict[str, Any]", inputs))
            else:
                found = self._extractor(*inputs) if isinstance(inputs, (tuple, list)) else self._extractor(inputs)
        if count < self._filled_to:
            found = _part(found, slice(count))
        cpu = torch.device("cpu")
        return {
            key: value.to(cpu, copy=True) if isinstance(value, torch.Tensor) else value
            for key, value in named(found).items()
        }

    def compute(self, numbers: Sequence[int], batch: Any) -> Computed:
        """Return the rows of a batch; where it fails, those of its halves.

        What has not fitted into memory once is not tried again, but divided at once.
        """
        if len(numbers) > self._most_at_once:
            return self._halves(numbers, batch)
        try:
            found = self.features(batch)
            reason = self._difference(found, len(numbers))
        except Exception as error:  # the model's own
            if _is_fatal(error):
                raise
            if isinstance(error, torch.OutOfMemoryError) and len(numbers) > 1:
                self._most_at_once = len(numbers) - 1
                self._filled_to = min(self._filled_to, len(numbers) // 2)
            reason = reason_of(error)
        else:
            if not reason:
                return [(list(numbers), found)], []
        if len(numbers) == 1:
            return [], [(numbers[0], reason)]
        return self._halves(numbers, batch)

    def _halves(self, numbers: Sequence[int], batch: Any) -> Computed:
        half = len(numbers) // 2
        first = self.compute(numbers[:half], _part(batch, slice(None, half)))
        second = self.compute(numbers[half:], _part(batch, slice(half, None)))
        return first[0] + second[0], first[1] + second[1]

    def set_columns(self, few: Rows, more: Rows, sizes: tuple[int, int] = (1, 2)) -> None:
        """Note the form of the features, from those of two numbers of samples.

        Raises:
            RequestError: a value is no tensor, or has no row for each sample.
        """
        for key, value in more.items():
            if not isinstance(value, torch.Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise RequestError(f"'{key}' is a {type(value).__name__} and no tensor; name a value inside it")
            if value.dim() == 0 or (len(few[key]), len(value)) != sizes:
                raise RequestError(
                    f"'{key}' has the shape {tuple(value.shape)} for {sizes[1]} samples, so it has no row for each; "
                    "ask for another value, or bring the samples to the front by Feature(apply=...)"
                )
            if value.shape[1:] != few[key].shape[1:]:
                raise RequestError(
                    f"'{key}' is {tuple(value.shape)} for {sizes[1]} samples and {tuple(few[key].shape)} for "
                    f"{sizes[0]}: what one sample gives depends on the others"
                )
        self.columns = tuple(Column(key, tuple(value.shape[1:]), value.dtype) for key, value in more.items())

    def _difference(self, found: Rows, count: int) -> str:
        for column in self.columns:
            value = found[column.name]
            if tuple(value.shape) != (count, *column.shape) or value.dtype != column.dtype:
                return (
                    f"'{column.name}' is {tuple(value.shape[1:])} of {value.dtype}, and {column.shape} of "
                    f"{column.dtype} for the first sample; pool it, or bring samples to one size"
                )
        return ""


def other_dtype(model: nn.Module, images: Any) -> torch.dtype | None:
    """Return the one dtype of the weights of a model, where images of floats have another one; else None."""
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    is_of_floats = isinstance(images, torch.Tensor) and images.is_floating_point()
    return next(iter(dtypes)) if is_of_floats and len(dtypes) == 1 and images.dtype not in dtypes else None


def _count(batch: Any) -> int:
    return next((len(leaf) for leaf in tensors_in(batch)), 0)


def _filled(batch: Any, count: int, size: int) -> Any:
    """Repeat the last sample of a batch until there are so many."""
    if not 0 < count < size:
        return batch
    numbers = torch.arange(size).clamp(max=count - 1)
    return tree_map(lambda leaf: leaf[numbers] if isinstance(leaf, torch.Tensor) else leaf, batch)


def _part(batch: Any, part: slice) -> Any:
    return tree_map(lambda leaf: leaf[part] if isinstance(leaf, torch.Tensor) else leaf, batch)


def _is_fatal(error: Exception) -> bool:
    """Say whether no further batch can run: a GPU that has failed, or a fault of the job itself."""
    is_of_device = isinstance(error, RuntimeError) and "CUDA error" in str(error)
    return isinstance(error, ExtractionError) or is_of_device
