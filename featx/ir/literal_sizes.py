"""Which sizes of values follow from literals of a graph: the last one of `x.view(n, -1, 8)` is 8."""

from __future__ import annotations

import operator
from typing import cast

from featx.ir.arguments import Argument
from featx.ir.graph import Graph
from featx.ir.node import Node

_Sizes = list[int | None]


def literal_sizes(graph: Graph) -> dict[Node, int]:
    """Return the nodes that read a size of a value, as `x.shape[3]`, for which the graph has a number. O(nodes).

    It has one where `view` or `reshape` gets the size as a literal, and only `transpose` and `contiguous` follow.
    """
    known: dict[Node, _Sizes] = {}
    found: dict[Node, int] = {}
    for node in graph.nodes:
        if node.op == "call_method" and not node.kwargs:
            sizes = _sizes_of(node, known)
            if sizes is not None:
                known[node] = sizes
        elif node.target is operator.getitem:
            size = _size_read(node, known)
            if size is not None:
                found[node] = size
    return found


def _sizes_of(node: Node, known: dict[Node, _Sizes]) -> _Sizes | None:
    """Return the sizes of what a call of a method returns, None for unknown ones; or None if all are unknown."""
    value, *args = node.args
    if node.target in ("view", "reshape"):
        places = args[0] if len(args) == 1 and isinstance(args[0], (tuple, list)) else args
        sizes = [_size(each) for each in cast("list[Argument]", places)]
        return sizes if any(size is not None for size in sizes) else None
    sizes = known.get(value) if isinstance(value, Node) else None
    if sizes is None or node.target not in ("transpose", "contiguous"):
        return None
    sizes = list(sizes)
    if node.target == "transpose":
        first, second = args
        if not isinstance(first, int) or not isinstance(second, int):
            return None
        sizes[first], sizes[second] = sizes[second], sizes[first]
    return sizes


def _size(value: Argument) -> int | None:
    return value if type(value) is int and value >= 0 else None


def _size_read(node: Node, known: dict[Node, _Sizes]) -> int | None:
    shape, place = node.args
    is_shape = isinstance(shape, Node) and shape.target is getattr and shape.args[1] == "shape"
    if not is_shape or not isinstance(place, int):
        return None
    sizes = known.get(cast(Node, shape.args[0]))
    return None if sizes is None or not -len(sizes) <= place < len(sizes) else sizes[place]
