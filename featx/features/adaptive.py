"""AdaptiveExtractor: one extractor for each kind of input that a model treats in another way, made when it comes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from featx.errors import TraceError
from featx.features.dual import DualGraphModule
from featx.features.examples import Example
from featx.ir.effects import Effects
from featx.ir.graph import Graph
from featx.tree import tree_leaves

Build = Callable[[Any], DualGraphModule]


class AdaptiveExtractor(nn.Module):
    """Computes features of a model for any input, with a graph for each case that the model distinguishes.

    An input for which no graph holds is traced anew, in the present mode; that costs what creating an extractor does.
    Any input may need any part of the model, so this module has all of its parts under their names: submodules,
    parameters and buffers are shared with it, and the keys of the state dict are the model's.

    A graph may find out in the middle that it does not hold. Inputs, buffers and random generators are put back then,
    before another one runs; what a submodule that is kept whole counts in plain Python attributes is not.

    Args:
        model: where the values come from.
        first: an extractor for `model`.
        build: makes another one from an example.
    """

    def __init__(self, model: nn.Module, first: DualGraphModule, build: Build) -> None:
        super().__init__()
        state = self.__dict__
        for shared in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            state[shared] = model.__dict__[shared]
        state.update(training=model.training, _model=model, _build=build, _extractors=[first], _best={})

    @property
    def extractors(self) -> tuple[DualGraphModule, ...]:
        """The extractors so far, the oldest first."""
        return tuple(self.__dict__["_extractors"])

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the requested values for these inputs.

        Raises:
            TraceError: the model cannot be traced on these inputs.
        """
        best: dict[Any, DualGraphModule] = self.__dict__["_best"]
        key = (self.training, *[_form(leaf) for leaf in tree_leaves((args, kwargs))])
        known = [best[key]] if key in best else []
        for extractor in [*known, *[one for one in self.extractors if one not in known]]:
            result = self._attempt(extractor, args, kwargs)
            if result is not None:
                best[key] = extractor
                return result
        extractor = self.__dict__["_build"](Example(args, kwargs, "this input"))
        result = self._in_mode(extractor)(*args, **kwargs)
        self.__dict__["_extractors"].append(extractor)
        best[key] = extractor
        return result

    def _in_mode(self, extractor: DualGraphModule) -> DualGraphModule:
        return extractor if extractor.training is self.training else extractor.train(self.training)

    def _attempt(self, extractor: DualGraphModule, args: Any, kwargs: Any) -> dict[str, Any] | None:
        runner = self._in_mode(extractor)
        snapshot = _Snapshot(self, (args, kwargs)) if _may_fail_late(runner) else None
        try:
            return runner(*args, **kwargs)
        except TraceError:
            if snapshot is not None:
                snapshot.restore()
            return None

    def train(self, mode: bool = True) -> AdaptiveExtractor:
        """Put this module, and the model with it, into train or eval mode."""
        self.__dict__["_model"].train(mode)
        self.training = mode
        return self

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> AdaptiveExtractor:
        super()._apply(fn, recurse)
        for extractor in self.extractors:
            extractor._apply(fn, recurse)
        return self

    def _get_name(self) -> str:
        return f"AdaptiveExtractor({type(self.__dict__['_model']).__name__})"


def _form(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype, value.device
    return value if isinstance(value, (bool, int, float, str, type(None))) else type(value)


def _may_fail_late(extractor: DualGraphModule) -> bool:
    """Say whether a check of the graph comes behind something that leaves traces. Remembered by the extractor."""
    graph = extractor.graph
    known: dict[Graph, bool] = extractor.meta.setdefault("may_fail_late", {})
    if graph not in known:
        effects = Effects(graph, extractor)
        traces = [
            node
            for node in graph.nodes
            if node.op not in ("placeholder", "output") and not node.meta.get("is_guard") and effects.is_impure(node)
        ]
        known[graph] = any(node.meta.get("is_guard") and traces[0] < node for node in graph.nodes if traces)
    return known[graph]


class _Snapshot:
    """Buffers and parameters of a module, inputs and the state of the random generators."""

    def __init__(self, module: nn.Module, inputs: Any) -> None:
        tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
        self._saved = [(tensor, tensor.detach().clone()) for tensor in (*module.buffers(), *tensors)]
        self._generator = torch.get_rng_state()
        self._on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    def restore(self) -> None:
        with torch.no_grad():
            for tensor, saved in self._saved:
                tensor.copy_(saved)
        torch.set_rng_state(self._generator)
        if self._on_gpus:
            torch.cuda.set_rng_state_all(self._on_gpus)
