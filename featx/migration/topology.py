"""Put the nodes of a graph into an order in which each stands behind what it reads."""

from __future__ import annotations

import heapq
import itertools

from featx.errors import GraphError
from featx.module import GraphModule


def stable_topological_sort(gm: GraphModule) -> GraphModule:
    """Move each node of the graph of `gm` behind its inputs, and return `gm`.

    Of the nodes that may come next, the one that stood first comes first, so an order that was right stays. Nodes are
    moved and not copied. O(nodes * log(nodes) + edges).

    Raises:
        GraphError: nodes read each other in a circle; nothing is moved then.
    """
    nodes = list(gm.graph.nodes)
    places = {node: place for place, node in enumerate(nodes)}
    waiting = [len(node.all_input_nodes) for node in nodes]
    ready = [place for place, count in enumerate(waiting) if count == 0]
    order: list[int] = []
    while ready:
        order.append(place := heapq.heappop(ready))
        for user in nodes[place].users:
            waiting[places[user]] -= 1
            if waiting[places[user]] == 0:
                heapq.heappush(ready, places[user])
    if len(order) < len(nodes):
        stuck = [node.name for place, node in enumerate(nodes) if waiting[place]]
        raise GraphError(f"nodes {', '.join(stuck[:5])} read each other in a circle, so no order of them is right")
    _rearrange(gm, order)
    return gm


def _rearrange(gm: GraphModule, order: list[int]) -> None:
    nodes = list(gm.graph.nodes)
    if order and order[0] != 0:
        nodes[0].prepend(nodes[order[0]])
    for previous, place in itertools.pairwise(order):
        if nodes[previous].next is not nodes[place]:
            nodes[previous].append(nodes[place])
