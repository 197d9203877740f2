"""Compare two graphs, or two arguments, for being the same."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from featx.ir.graph import Graph
from featx.ir.node import Node, map_arg


def is_same_graph(one: Graph, other: Graph, besides: Collection[Node] = ()) -> bool:
    """Say whether two graphs have the same nodes, by opcode, target, name and arguments. O(nodes + edges).

    Tensors that stand in arguments are the same if they are one object or have the same values. What the form of a
    value is checked to be (`node.meta["is_form_check"]`) does not count: that check says itself where it does not hold.
    Nor do the arguments of the nodes `besides`, of either graph.
    """
    if len(one.nodes) != len(other.nodes):
        return False
    twins: dict[Node, Node] = {}
    for node, twin in zip(one.nodes, other.nodes, strict=True):
        if node.op != twin.op or node.name != twin.name or not _is_same(node.target, twin.target):
            return False
        arguments = map_arg((node.args, node.kwargs), twins.__getitem__)
        is_excepted = node.meta.get("is_form_check") or node in besides or twin in besides
        if not is_excepted and not _is_same(arguments, (twin.args, twin.kwargs)):
            return False
        twins[node] = twin
    return True


def _is_same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other) or isinstance(one, Node):
        return False
    if isinstance(one, torch.Tensor):
        return (
            one.shape == other.shape
            and one.dtype == other.dtype
            and not (one.is_meta or other.is_meta)
            and torch.equal(one, other)
        )
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(_is_same(one[key], other[key]) for key in one)
    return repr(one) == repr(other) if isinstance(one, float) else bool(one == other)
