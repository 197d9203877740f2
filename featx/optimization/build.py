"""Build the module that runs by a recipe."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from featx.errors import MissingExtraError, OptimizationError, TraceError
from featx.examples import Example
from featx.features.adaptive import AdaptiveExtractor
from featx.features.describing.info import FeatureInfos
from featx.features.dual import DualGraphModule
from featx.module import GraphModule, opened
from featx.optimization.module import OptimizedExtractor, ranks_of
from featx.optimization.onednn import compute_linears_by_onednn
from featx.optimization.openvino_runner import check_available
from featx.optimization.recipe import OPENVINO, Recipe

Extractor = DualGraphModule | AdaptiveExtractor


class Builder:
    """Makes modules of an extractor, which stays as it is.

    Args:
        extractor: in eval mode.
        example: inputs of it.
        dtypes: those of its features.
    """

    def __init__(self, extractor: Extractor, example: Example, dtypes: dict[str, list[str]]) -> None:
        self._extractor = extractor
        self._example = example
        self.dtypes = dtypes
        self._opened: GraphModule | None = None
        self.problem = ""
        # By rewrites, the last one alone: a graph that is rewritten, and which of these have changed anything.
        self._rewritten: tuple[tuple[str, ...], GraphModule, tuple[str, ...]] | None = None

    def try_to_open(self) -> bool:
        """Trace the extractor, once; say whether it has one graph that can be edited. `problem` says why not."""
        if self._opened is None and not self.problem:
            if isinstance(self._extractor, AdaptiveExtractor) or self._extractor.makes_further_graphs:
                self.problem = "the extractor makes further graphs for other inputs, which would not be edited"
            else:
                try:
                    args, kwargs = self._example.args, self._example.kwargs
                    with torch.no_grad():
                        self._opened = opened(self._extractor, False, args, kwargs)
                except TraceError as error:
                    self.problem = str(error)
        return self._opened is not None

    def effective_rewrites(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Return which of these rewrites change the graph."""
        return self._rewrite(names)[1] if names and self.try_to_open() else ()

    def _rewrite(self, names: tuple[str, ...]) -> tuple[GraphModule, tuple[str, ...]]:
        if self._rewritten is None or self._rewritten[0] != names:
            assert self._opened is not None
            gm = copy.copy(self._opened)  # which shares the weights
            gm.eval()
            self._rewritten = names, gm, Recipe(rewrites=names).rewrite(gm)
        return self._rewritten[1:]

    def build(self, recipe: Recipe) -> OptimizedExtractor:
        """Return a module that runs by a recipe, with copies of the weights.

        Raises:
            OptimizationError: the recipe edits the graph, and the extractor cannot be edited.
            MissingExtraError: int8 or OpenVINO is asked for, and torchao or OpenVINO is not installed.
        """
        if recipe.compile == OPENVINO:
            check_available()
        source: nn.Module = self._extractor
        if recipe.rewrites:
            if not self.try_to_open():
                raise OptimizationError(f"the graph of this extractor cannot be edited: {self.problem}")
            source = self._rewrite(recipe.rewrites)[0]
        module = copy.deepcopy(source).eval().requires_grad_(False)
        if recipe.torch_dtype is not None:
            self._cast(module, recipe)
        if recipe.channels_last:
            module.to(memory_format=torch.channels_last)
        if recipe.onednn:
            compute_linears_by_onednn(module)
        if recipe.int8:
            _quantize(module)
        optimized = OptimizedExtractor(module, recipe, self._extractor.feature_info, self.dtypes)
        optimized.ranks = ranks_of((self._example.args, self._example.kwargs))
        return optimized

    def _cast(self, module: nn.Module, recipe: Recipe) -> None:
        """Cast the weights; buffers that are no part of the state only if the model does not run without that.

        These are tables that the model computes from, such as the frequencies of rotary positions: angles of several
        thousand radians have no digits left in half precision, whatever the error is for short texts.
        """
        dtype = recipe.torch_dtype
        tables = {
            id(part._buffers[name])
            for part in module.modules()
            for name in part._non_persistent_buffers_set
            if part._buffers.get(name) is not None
        }

        def cast(tensor: torch.Tensor) -> torch.Tensor:
            return tensor if id(tensor) in tables or not tensor.is_floating_point() else tensor.to(dtype)

        module._apply(cast)
        if tables:
            try:
                probe = OptimizedExtractor(module, Recipe(dtype=recipe.dtype), FeatureInfos(()), {})
                probe(*self._example.args, **self._example.kwargs)
            except Exception:  # an operation that wants one dtype
                module.to(dtype)


def _quantize(module: nn.Module) -> None:
    try:
        from torchao import quantization  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise MissingExtraError('int8 needs torchao: pip install "featx[int8]"', name="torchao") from error
    config: Any = quantization.Int8DynamicActivationInt8WeightConfig()
    quantization.quantize_(module, config)
