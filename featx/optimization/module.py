"""OptimizedExtractor: an extractor that runs by a recipe."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from featx.errors import SpecializationError
from featx.features.describing.info import FeatureInfos
from featx.optimization.openvino_runner import OpenVINORunner
from featx.optimization.recipe import COMPILATIONS, OPENVINO, Recipe
from featx.tree import tensors_in, tree_map

if TYPE_CHECKING:
    from featx.optimization.plan import Plan


class OptimizedExtractor(nn.Module):
    """Computes what an extractor computes, faster and with a small error; `featx.optimize` makes it.

    Takes the inputs of that extractor and returns the same keys, in the same dtypes; what the values have in memory
    may be in another order (`channels_last`). It has copies of the weights, computes without gradients, and stays in
    eval mode. An input of another size is compiled for at its first call, which takes seconds.

    Attributes:
        plan: what was tried, gained and lost, and the recipe.
        feature_info: what is returned, as for the extractor; `channels` and `strides` too.
    """

    why_not_traced = (
        "an optimized extractor computes what it was made for, and is traced no more; give the model, or the extractor "
        "that it was made of. featx.extract takes tolerance=... instead"
    )

    def __init__(self, base: nn.Module, recipe: Recipe, infos: FeatureInfos, dtypes: dict[str, list[str]]) -> None:
        super().__init__()
        self.extractor = base
        self.plan: Plan | None = None
        self.recipe = recipe
        self.feature_info = infos
        self._dtypes = {key: [_dtype_of(name) for name in names] for key, names in dtypes.items()}
        self._changes_nothing = recipe == Recipe()
        # What runs, once that is made. In a list, because a module in an attribute would count as a submodule.
        self._runners: list[Callable[..., Any]] = []
        # How many dimensions the tensors of the example have; others may have no samples to compute in parts.
        self.ranks: list[int] | None = None
        self._returns_dict = True
        self.training = False

    @property
    def channels(self) -> list[Any]:
        """The channels of each feature; None where they are not known."""
        return self.feature_info.channels()

    @property
    def strides(self) -> list[Any]:
        """The stride of each feature in pixels of the input; None where it is not known."""
        return self.feature_info.reduction()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the features of these inputs, in a dict, or in a list where the extractor does.

        Raises:
            SpecializationError: the model would do something else for this input than was traced.
        """
        if self._changes_nothing:  # a small network takes no longer than the call of this one
            with torch.no_grad():
                return self.extractor(*args, **kwargs)
        with torch.no_grad(), _threads(self.recipe.threads):
            are_batches = self.ranks in (None, ranks_of((args, kwargs)))
            parts = divided(args, kwargs, self.recipe.rows if are_batches else None)
            found = [self._part(*part) for part in parts]
            joined = found[0] if len(found) == 1 else _joined(found, parts)
            result = self._part(args, kwargs) if joined is None else joined
            return result if self._returns_dict else list(result.values())

    def _part(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        args, kwargs = tree_map(self._prepared, (args, kwargs))
        try:
            result = self._runner()(*args, **kwargs)
        except SpecializationError:
            if self.recipe.compile is None:
                raise
            result = self.extractor(*args, **kwargs)  # which may have a further graph for such an input
        self._returns_dict = isinstance(result, dict)
        return {key: self._restored(key, value) for key, value in named(result).items()}

    def _runner(self) -> Callable[..., Any]:
        if not self._runners:
            self._runners.append(_compiled(self.extractor, self.recipe.compile))
        return self._runners[0]

    def _prepared(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        dtype = self.recipe.torch_dtype
        if dtype is not None and value.is_floating_point():
            value = value.to(dtype)
        if self.recipe.channels_last and value.dim() == 4:
            value = value.contiguous(memory_format=torch.channels_last)
        return value

    def _restored(self, key: str, value: Any) -> Any:
        dtypes = iter(self._dtypes.get(key, ()))

        def restored(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            return leaf.to(next(dtypes, leaf.dtype), copy=self.recipe.overwrites_results)

        return tree_map(restored, value)

    @property
    def problem(self) -> str:
        """Why a call was left to the extractor, by a compiler that does not raise; empty if none was."""
        return next((runner.problem for runner in self._runners if isinstance(runner, OpenVINORunner)), "")

    def compiled_anew(self) -> OptimizedExtractor:
        """Return a module that runs by the same recipe, with the same weights, and nothing that is compiled by now."""
        module = copy.copy(self)
        module._runners = []
        return module

    def uncompiled(self) -> OptimizedExtractor:
        """Return a module that runs by the same recipe but for torch.compile, with the same weights."""
        module = self.compiled_anew()
        module.recipe = replace(self.recipe, compile=None)
        return module

    def train(self, mode: bool = True) -> OptimizedExtractor:
        """Stay in eval mode, and warn where train mode is asked for.

        It computes the same then, so that it can be a frozen part of a model that trains.
        """
        if mode:
            warnings.warn(
                "an optimized extractor stays in eval mode and trains no more: it has weights of its own, without "
                "gradients. To train, use the extractor that it was made of, and optimize that again",
                stacklevel=2,
            )
        return self

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> OptimizedExtractor:
        self._runners = []  # compiled code holds the tensors of before
        before = self._dtypes_of_weights()
        super()._apply(fn, recurse)
        if self._dtypes_of_weights() != before:  # after `float()` or `double()` inputs are taken as they are
            self.recipe = replace(self.recipe, dtype=None)
            warnings.warn(
                "the weights of an optimized extractor are of another dtype now, which its plan has not measured; "
                "inputs have to be of that dtype. To measure it, convert the extractor, and optimize that",
                stacklevel=3,
            )
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._runners = []  # as above
        super()._load_from_state_dict(*args, **kwargs)

    def _dtypes_of_weights(self) -> set[torch.dtype]:
        return {weight.dtype for weight in self.parameters() if weight.is_floating_point()}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_runners": []}  # compiled anew where it is loaded

    def __repr__(self) -> str:
        return f"{self.feature_info}\n\nOptimizedExtractor({self.recipe})"


def _compiled(extractor: nn.Module, kind: str | None) -> Callable[..., Any]:
    if kind is None:
        return extractor
    return OpenVINORunner(extractor) if kind == OPENVINO else torch.compile(extractor, **COMPILATIONS[kind])


def ranks_of(inputs: Any) -> list[int]:
    """Return how many dimensions each tensor of inputs has."""
    return [leaf.dim() for leaf in tensors_in(inputs)]


def named(features: Any) -> dict[str, Any]:
    """Return features by their keys; those of a list, which a backbone may return, by their numbers."""
    return features if isinstance(features, dict) else {str(index): value for index, value in enumerate(features)}


def dtypes_of(features: dict[str, Any]) -> dict[str, list[str]]:
    """Return the names of the dtypes of the tensors in each feature."""
    return {
        key: [str(leaf.dtype).removeprefix("torch.") for leaf in tensors_in(value)] for key, value in features.items()
    }


def _dtype_of(name: str) -> torch.dtype:
    return getattr(torch, name)


@contextmanager
def _threads(number: int | None) -> Generator[None]:
    if number is None:  # torch.compile(fullgraph=True) knows no threads
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def divided(
    args: tuple[Any, ...], kwargs: dict[str, Any], rows: int | None
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Divide inputs into parts of so many samples; those whose tensors have not all one length are one part."""
    sizes = {len(leaf) if leaf.dim() else 0 for leaf in tensors_in((args, kwargs))}
    if rows is None or len(sizes) != 1 or max(sizes) <= rows:
        return [(args, kwargs)]

    def part(start: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return tree_map(
            lambda leaf: leaf[start : start + rows] if isinstance(leaf, torch.Tensor) else leaf, (args, kwargs)
        )

    return [part(start) for start in range(0, max(sizes), rows)]


def _joined(found: list[dict[str, Any]], parts: list[tuple[tuple[Any, ...], dict[str, Any]]]) -> dict[str, Any] | None:
    """Join the features of parts of a batch; None where one has no row for each sample, or rows of other shapes."""
    counts = [next(len(leaf) for leaf in tensors_in(part)) for part in parts]
    result: dict[str, Any] = {}
    for key, value in found[0].items():
        values = [each[key] for each in found]
        have_rows = isinstance(value, torch.Tensor) and all(
            each.dim() and len(each) == count and each.shape[1:] == value.shape[1:]
            for each, count in zip(values, counts, strict=True)
        )
        if not have_rows:
            return None
        result[key] = torch.cat(values)
    return result
