"""What of a trace matters for what is requested of it, and whether a further run of the model does the same in that."""

from __future__ import annotations

from collections.abc import Collection

from featx.ir.equality import is_same_graph
from featx.ir.node import Node
from featx.tracing.example.trace import ExampleTrace


def matches_needed_nodes(again: ExampleTrace, trace: ExampleTrace, ignoring: Collection[Node] = ()) -> bool:
    """Say whether `again` has the nodes of `trace` up to the last needed one, with the requested ones in their places.

    What modules do after that node may differ. But a loop over `self.layers[:n]` that goes on there returns something
    else. The arguments of the nodes in `ignoring` are not compared. O(nodes + edges).
    """
    has_nodes = is_same_graph(again.graph, trace.graph, ignoring, count=trace.needed)
    return has_nodes and requested_places_match(again, trace)


def requested_places_match(again: ExampleTrace, trace: ExampleTrace) -> bool:
    """Say whether the requested nodes are at the same places in both graphs, where not all of these is compared."""
    return trace.needed is None or places_of_requested(again) == places_of_requested(trace)


def places_of_requested(trace: ExampleTrace) -> list[int] | None:
    """Return where in the graph of a trace the requested nodes are; None where one is missing. O(nodes)."""
    requested = trace.requested()
    places = {node: place for place, node in enumerate(list(trace.graph.nodes))} if requested else {}
    return sorted(places[node] for node in requested) or None


def count_needed(trace: ExampleTrace) -> int | None:
    """Return how many nodes of a trace come up to the last one that matters for the requested ones; None is all."""
    last = None if trace.find_requested is None else trace.find_requested.last_needed(trace.graph)
    return None if last is None else 1 + next(place for place, node in enumerate(trace.graph.nodes) if node is last)
