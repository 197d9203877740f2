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
from featx.tracing.environment.compiler import not_compiled, not_compiled_itself
from featx.tree import tree_leaves


class RollbackRunner:
    """Runs graphs, and knows for each whether something is written or drawn ahead of one of its checks."""

    def __init__(self) -> None:
        # By graph: how often it had been edited when it was looked at, and what was found.
        self._known: WeakKeyDictionary[Graph, tuple[int, bool]] = WeakKeyDictionary()

    @not_compiled_itself
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
        if not self._has_effects_before_check(graph, module):
            return run(*args, **kwargs)
        snapshot = _Snapshot(module, (args, kwargs))
        try:
            return run(*args, **kwargs)
        except TraceError:
            snapshot.restore()
            raise

    @not_compiled
    def _has_effects_before_check(self, graph: Graph, module: nn.Module) -> bool:
        known = self._known.get(graph)
        if known is None or known[0] != graph.edits:
            effects = Effects(graph, module)
            traces = [
                node
                for node in graph.nodes
                if node.op not in ("placeholder", "output")
                and not node.meta.get("is_guard")
                and not effects.of(node).is_check
                and effects.is_impure(node)
            ]
            is_late = any(node.meta.get("is_guard") and traces[0] < node for node in graph.nodes if traces)
            known = self._known[graph] = (graph.edits, is_late)
        return known[1]

    def __reduce__(self) -> tuple[type[RollbackRunner], tuple[()]]:
        return RollbackRunner, ()


class _Snapshot:
    """Buffers of a module, inputs and the state of the random generators."""

    def __init__(self, module: nn.Module, inputs: Any) -> None:
        tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
        self._saved = [_Saved(tensor) for tensor in (*module.buffers(), *tensors)]
        self._generator = torch.get_rng_state()
        self._on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    def restore(self) -> None:
        for each in self._saved:
            each.restore()
        torch.set_rng_state(self._generator)
        if self._on_gpus:
            torch.cuda.set_rng_state_all(self._on_gpus)


class _Saved:
    """A tensor as it was. It is written only if it has changed.

    Another write would break the backward pass of earlier outputs, and into an expanded tensor it fails.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._copy = tensor, tensor.detach().clone()
        self._version = self._count_writes()

    def restore(self) -> None:
        # Batch norm writes its statistics without counting.
        if self._count_writes() != self._version or not _is_same(self._tensor, self._copy):
            with torch.inference_mode(self._tensor.is_inference()), torch.no_grad():
                self._tensor.copy_(self._copy)

    def _count_writes(self) -> int | None:
        return None if self._tensor.is_inference() else self._tensor._version


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.layout is not torch.strided or one.is_meta:
        return True  # no kernel compares these; what writes them counts
    if torch.equal(one, other):
        return True
    return one.is_floating_point() and bool(torch.all((one == other) | (one.isnan() & other.isnan())))
