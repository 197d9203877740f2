"""What Python has decided by in a traced graph: values of the inputs, or random numbers."""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch

from featx.ir.form import sources_of_values
from featx.ir.graph import Graph
from featx.ir.node import Node
from featx.ir.operator_facts import draws_now, name_of
from featx.libraries import MASK_OF_PADDING
from featx.tracing.guards.guards import check_decision

_INDICES = (torch.int64, torch.int32)


def branches_on_inputs(graph: Graph) -> bool:
    """Say whether Python has decided something by the values of inputs, or whether batches may be padded. O(nodes).

    Models of text and of speech take indices, or a mask, with or without padding.
    """
    inputs = graph.find_nodes(op="placeholder")
    if any(node.meta.get("dtype") in _INDICES or node.target == MASK_OF_PADDING for node in inputs):
        return any(node.meta.get("is_guard") for node in graph.nodes)
    return _decides_by(graph, lambda node: node.op == "placeholder")


def branches_on_random(graph: Graph) -> bool:
    """Say whether Python has decided something by random numbers. O(nodes)."""
    return _decides_by(graph, _draws)


def _decides_by(graph: Graph, is_source: Callable[[Node], bool]) -> bool:
    seen = set(graph.find_nodes(op="call_function", target=check_decision))
    left = list(seen)
    while left:
        node = left.pop()
        # Whether two values are one object is no value of theirs.
        for source in sources_of_values(node) if node.target is not operator.is_ else ():
            if is_source(source):
                return True
            if source not in seen:
                seen.add(source)
                left.append(source)
    return False


def _draws(node: Node) -> bool:
    is_call = node.op in ("call_function", "call_method")
    return is_call and draws_now(name_of(node.target), node.args, node.kwargs)
