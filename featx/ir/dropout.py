"""Compare graphs that may differ in how much dropout there is, as those of train and eval mode do."""

from __future__ import annotations

from featx.ir.arguments import map_arg
from featx.ir.equality import first_nodes, is_same, nodes_with_other_constants
from featx.ir.graph import Graph
from featx.ir.node import Node
from featx.ir.operator_facts import facts_of_call, name_of

_CONSTANTS = frozenset({bool, int, float})


def nodes_of_dropout(one: Graph, other: Graph, count: int | None = None) -> set[Node] | None:
    """Return the nodes of `one` that differ from those of `other` in how much dropout they do; O(nodes + edges).

    That is in the probability or the flag `training` of a call of torch. None where the graphs differ in anything else,
    compared as in `is_same_graph`.
    """
    differing = nodes_with_other_constants(one, other, _CONSTANTS, count)
    if not differing:
        return None if differing is None else set()
    twins = dict(zip(first_nodes(one, count), first_nodes(other, count), strict=False))
    return set(differing) if all(_differ_in_dropout(node, twins) for node in differing) else None


def _differ_in_dropout(node: Node, twins: dict[Node, Node]) -> bool:
    twin, facts = twins[node], facts_of_call(node)
    if facts.dropout_at is not None:
        positions, names = {facts.dropout_at}, {"dropout_p", "training"}
    elif facts.training_at is not None and "dropout" in name_of(node.target):
        positions, names = {1, facts.training_at}, {"p", "training"}
    else:
        return False
    args, kwargs = map_arg((node.args, node.kwargs), twins.__getitem__)
    pairs = [pair for position, pair in enumerate(zip(args, twin.args, strict=True)) if position not in positions]
    pairs += [(value, twin.kwargs[name]) for name, value in kwargs.items() if name not in names]
    return all(is_same(*pair) for pair in pairs)
