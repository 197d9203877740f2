"""Find the requested nodes in the graph of a trace that may have broken off."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from torch import nn

from featx.errors import NodeNameError
from featx.features.building.liveness import last_needed
from featx.features.requests.select import select
from featx.ir.graph import Graph
from featx.ir.node import Node
from featx.tracing.nodes.naming import CallSite


class Finder:
    """Finds the nodes that a request means; see `RequestedNodeFinder`.

    Args:
        request: node names to keys.
        owner: what the names belong to, for messages.
        model_in_mode: returns the model in the mode in which it is traced.
        sites: as for `select`.
    """

    def __init__(
        self,
        request: Mapping[str, str],
        owner: str,
        model_in_mode: Callable[[], nn.Module],
        sites: Mapping[str, CallSite],
    ) -> None:
        self._request = request
        self._owner = owner
        self._model_in_mode = model_in_mode
        self._sites = sites

    def __call__(self, graph: Graph, failed_module_path: str) -> Collection[Node]:
        """Return the requested nodes of a graph that broke off in a module, or none where one is missing."""
        try:
            found = select(graph, self._request, self._owner, self._sites)
        except NodeNameError:
            return ()
        # A name that a pattern stands for may be missing: that module does not run.
        present = ((name, found[key]) for name, key in self._request.items() if key in found)
        is_missing = any(_comes_later(name, node, failed_module_path) for name, node in present)
        return () if is_missing else found.values()

    def last_needed(self, graph: Graph) -> Node | None:
        """Return the last node of a whole graph that matters for the requested ones, if they are all there."""
        requested = self(graph, "")
        return last_needed(graph, requested, self._model_in_mode()) if requested else None


def _comes_later(name: str, node: Node, failed_module_path: str) -> bool:
    """Say whether a name means the last node of a module that has not come to its end: the trace broke off inside."""
    is_last_of_module = name not in (node.meta.get("qualified_name"), node.target)
    return is_last_of_module and f"{failed_module_path}.".startswith(f"{name}.")
