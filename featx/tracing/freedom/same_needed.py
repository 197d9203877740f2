"""Compare a further run of a model with a trace, as far as that matters for what is wanted of it."""

from __future__ import annotations

from collections.abc import Collection

from featx.ir.equality import is_same_graph
from featx.ir.node import Node
from featx.tracing.example.conditions import RequestedNodeFinder
from featx.tracing.example.trace import ExampleTrace


def does_what_is_needed(
    again: ExampleTrace, trace: ExampleTrace, find_requested: RequestedNodeFinder | None, besides: Collection[Node] = ()
) -> bool:
    """Say whether a further run does the same as `trace` up to the last node that is needed, and means it by the names.

    What modules do behind that node may differ. But a loop over `self.layers[:n]` that goes on there returns something
    else. The arguments of the nodes `besides` do not count. O(nodes + edges).
    """
    if not is_same_graph(again.graph, trace.graph, besides, first=trace.needed):
        return False
    return means_the_same(again, trace, find_requested)


def means_the_same(again: ExampleTrace, trace: ExampleTrace, find_requested: RequestedNodeFinder | None) -> bool:
    """Say whether the wanted nodes are at the same places in both graphs, where not all of these is compared."""
    return trace.needed is None or places_of_requested(again, find_requested) == places_of_requested(
        trace, find_requested
    )


def places_of_requested(trace: ExampleTrace, find_requested: RequestedNodeFinder | None) -> list[int] | None:
    """Return where in the graph of a trace the wanted nodes are; None where one is missing. O(nodes)."""
    if find_requested is None:
        return None
    is_cut = trace.early_stop_reason is not None
    wanted = find_requested(trace.graph, trace.module_calls.failed_module_path if is_cut else "")
    places = {node: place for place, node in enumerate(list(trace.graph.nodes))}
    return sorted(places[node] for node in wanted) or None
