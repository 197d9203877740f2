"""Put the nodes of a graph into an order in which each stands after what it reads."""

from __future__ import annotations

import itertools

from featx.errors import GraphError
from featx.module import GraphModule
from featx.passes.ordering import first_order


def stable_topological_sort(gm: GraphModule) -> GraphModule:
    """Move each node of the graph of `gm` after its inputs, and return `gm`.

    Of the nodes that may come next, the one that stood first comes first, so an order that was right stays. Nodes are
    moved and not copied. O(nodes * log(nodes) + edges).

    Raises:
        GraphError: nodes read each other in a circle; nothing is moved then.
    """
    nodes = list(gm.graph.nodes)
    places = {node: place for place, node in enumerate(nodes)}
    edges = ((places[source], places[node]) for node in nodes for source in node.all_input_nodes)
    order = [nodes[place] for place in first_order(len(nodes), edges)]
    if len(order) < len(nodes):
        stuck = sorted(set(nodes).difference(order), key=places.__getitem__)
        names = ", ".join(f"'{node.name}'" for node in stuck[:5])
        raise GraphError(f"nodes read each other in a circle, so no order of them is right: look at {names}")
    for previous, node in itertools.pairwise(order):
        if previous.next is not node:
            previous.append(node)
    return gm
