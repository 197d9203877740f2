"""Run graphs that may find out in the middle that they do not hold, and put back what they have done until then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from featx.errors import TraceError
from featx.ir.effects import Effects
from featx.ir.graph import Graph
from featx.tree import tree_leaves


class Attempts:
    """Runs graphs, and knows of each whether something is written or drawn ahead of one of its checks."""

    def __init__(self) -> None:
        # By graph: how often it had been edited when it was looked at, and what was found.
        self._known: WeakKeyDictionary[Graph, tuple[int, bool]] = WeakKeyDictionary()

    def run(
        self,
        run: Callable[..., dict[str, Any]],
        graph: Graph,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> dict[str, Any]:
        """Return `run(*args, **kwargs)`; where the graph does not hold, put back inputs, buffers and generators.

        What a submodule that is kept whole counts in plain Python attributes is not put back. Free of cost where
        nothing is written or drawn ahead of a check; else O(inputs and buffers).

        Args:
            run: what runs the graph.
            graph: says whether there is anything to put back.
            module: has the buffers.
            args: the inputs.
            kwargs: those by name.

        Raises:
            TraceError: the graph does not hold for these inputs.
        """
        if not self._leaves_traces_ahead_of_a_check(graph, module):
            return run(*args, **kwargs)
        snapshot = _Snapshot(module, (args, kwargs))
        try:
            return run(*args, **kwargs)
        except TraceError:
            snapshot.restore()
            raise

    def _leaves_traces_ahead_of_a_check(self, graph: Graph, module: nn.Module) -> bool:
        known = self._known.get(graph)
        if known is None or known[0] != graph.edits:
            effects = Effects(graph, module)
            traces = [
                node
                for node in graph.nodes
                if node.op not in ("placeholder", "output")
                and not node.meta.get("is_guard")
                and effects.is_impure(node)
            ]
            is_late = any(node.meta.get("is_guard") and traces[0] < node for node in graph.nodes if traces)
            known = self._known[graph] = (graph.edits, is_late)
        return known[1]

    def __reduce__(self) -> tuple[type[Attempts], tuple[()]]:
        return Attempts, ()


class _Snapshot:
    """Buffers of a module, inputs and the state of the random generators."""

    def __init__(self, module: nn.Module, inputs: Any) -> None:
        tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
        self._saved = [
            (tensor, tensor.detach().clone(), _version_of(tensor)) for tensor in (*module.buffers(), *tensors)
        ]
        self._generator = torch.get_rng_state()
        self._on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    def restore(self) -> None:
        for tensor, saved, version in self._saved:
            # A write where there was none would break the backward pass of earlier outputs, and one into an expanded
            # tensor fails.
            if version is None or _version_of(tensor) != version:
                with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                    if version is not None or not torch.equal(tensor, saved):
                        tensor.copy_(saved)
        torch.set_rng_state(self._generator)
        if self._on_gpus:
            torch.cuda.set_rng_state_all(self._on_gpus)


def _version_of(tensor: torch.Tensor) -> int | None:
    """Return how often a tensor has been written; None for an inference tensor, which does not count."""
    return None if tensor.is_inference() else tensor._version
