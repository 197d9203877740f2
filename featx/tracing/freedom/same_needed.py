"""What of a trace matters for what is wanted of it, and whether a further run of the model does the same in that."""

from __future__ import annotations

from collections.abc import Collection

from featx.ir.equality import is_same_graph
from featx.ir.node import Node
from featx.tracing.example.trace import ExampleTrace


def does_what_is_needed(again: ExampleTrace, trace: ExampleTrace, besides: Collection[Node] = ()) -> bool:
    """Say whether a further run does the same as `trace` up to the last node that is needed, and means it by the names.

    What modules do behind that node may differ. But a loop over `self.layers[:n]` that goes on there returns something
    else. The arguments of the nodes `besides` do not count. O(nodes + edges).
    """
    return is_same_graph(again.graph, trace.graph, besides, first=trace.needed) and means_the_same(again, trace)


def means_the_same(again: ExampleTrace, trace: ExampleTrace) -> bool:
    """Say whether the wanted nodes are at the same places in both graphs, where not all of these is compared."""
    return trace.needed is None or places_of_requested(again) == places_of_requested(trace)


def places_of_requested(trace: ExampleTrace) -> list[int] | None:
    """Return where in the graph of a trace the wanted nodes are; None where one is missing. O(nodes)."""
    wanted = trace.requested()
    places = {node: place for place, node in enumerate(list(trace.graph.nodes))} if wanted else {}
    return sorted(places[node] for node in wanted) or None


def count_needed(trace: ExampleTrace) -> int | None:
    """Return how many nodes of a trace come up to the last one that matters for the wanted ones; None is all."""
    last = None if trace.find_requested is None else trace.find_requested.last_needed(trace.graph)
    return None if last is None else 1 + next(place for place, node in enumerate(trace.graph.nodes) if node is last)
