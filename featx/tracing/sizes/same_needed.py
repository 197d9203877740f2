"""What of a trace matters for what is requested of it, and whether a further run of the model does the same in that.

What the same calls were seen to do in that run is joined to what they did in the trace.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from featx.ir.effects import MeasuredEffects
from featx.ir.equality import first_nodes, is_same_graph
from featx.ir.graph import Graph
from featx.ir.node import Node
from featx.ir.operator_facts import name_of
from featx.tracing.example.trace import ExampleTrace

# Functions of torch that give more or fewer parts of another length. `unbind` gives as many as there are.
_GIVES_PARTS_BY_LENGTH = frozenset({"chunk", "split", "unsafe_chunk", "unsafe_split"})


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


def join_measured(graph: Graph, other: Graph, count: int | None = None) -> None:
    """Let `graph` know what calls were seen to write, share and draw in the same graph of another trace. O(nodes).

    With `count`, only so many nodes are the same.
    """
    for node, twin in zip(first_nodes(graph, count), first_nodes(other, count), strict=True):
        if twin.meta.get("is_overwritten"):
            node.meta["is_overwritten"] = True
        if "unpacked_into" in node.meta and _takes_another_length_apart(node, twin):
            node.meta["may_give_another_number"] = True
        measured: MeasuredEffects | None = node.meta.get("effects")
        if measured is not None and measured != twin.meta["effects"]:
            node.meta["effects"] = measured.joined(twin.meta["effects"])


def measures_of(graph: Graph) -> list[Any]:
    """Return what was measured of the calls of a graph, in a form that compares. O(nodes)."""
    keys = ("effects", "is_overwritten", "may_give_another_number")
    return [tuple(map(node.meta.get, keys)) for node in graph.nodes]


def _takes_another_length_apart(node: Node, twin: Node) -> bool:
    """Say whether a call has taken a dimension apart that was of another length at other sizes.

    It gave as many parts there, and may give fewer or more for a third length: `x.chunk(4)` gives 3 of 9.
    """
    is_of_torch = name_of(node.target) in _GIVES_PARTS_BY_LENGTH and not node.meta.get("is_wrapped")
    if not is_of_torch or not node.all_input_nodes:
        return False
    whole, other = (each.all_input_nodes[0].meta.get("shape", ()) for each in (node, twin))
    part, _ = next(iter(node.meta["parts"].values()), ((), None))
    lengths = zip(whole, other, part, strict=False)
    # A part that is the whole may be the only one of any dimension.
    return any(size != now and (part == whole or size != taken) for size, now, taken in lengths)
