"""What Python has decided by in a traced graph: values of the inputs, kinds of devices, or random numbers."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable

import torch

from featx.ir.arguments import Argument
from featx.ir.form import sources_of_values
from featx.ir.graph import Graph
from featx.ir.node import Node
from featx.ir.operator_facts import draws_now, name_of
from featx.libraries import INDICES_OF_TEXT, MASK_OF_PADDING
from featx.tracing.guards.guards import check_decision

_INDICES = (torch.int64, torch.int32)


def branches_on_inputs(graph: Graph) -> bool:
    """Say whether Python has decided something by the values of inputs, or whether batches may be padded. O(nodes).

    Models of text and of speech take indices, or a mask, with or without padding.
    """
    if any(map(_is_of_text, graph.find_nodes(op="placeholder"))):
        return any(node.meta.get("is_guard") for node in graph.nodes)
    return _decides_by(graph, lambda node: node.op == "placeholder")


def asks_for_device(graph: Graph) -> bool:
    """Say whether Python has decided something by the kind of device that a tensor is on. O(nodes)."""
    return any(
        _is_kind_of_device(check.args[0]) for check in graph.find_nodes(op="call_function", target=check_decision)
    )


def _is_kind_of_device(node: Argument) -> bool:
    if not isinstance(node, Node) or node.target is not getattr:
        return False
    owner, name = node.args[:2]
    is_of_device = isinstance(owner, Node) and owner.target is getattr and owner.args[1] == "device"
    return name in ("is_cuda", "is_cpu") or (name == "type" and is_of_device)


def _is_of_text(node: Node) -> bool:
    """Say whether an input, or what is taken out of it as of a dict `kwargs`, is indices or a mask of padding."""
    if node.meta.get("dtype") in _INDICES:
        return True
    names = [user.args[1] for user in node.users if user.target is operator.getitem and "dtype" not in node.meta]
    return node.target == MASK_OF_PADDING or MASK_OF_PADDING in names or INDICES_OF_TEXT in names


def branches_on_random(graph: Graph) -> bool:
    """Say whether Python has decided something by random numbers. O(nodes)."""
    return _decides_by(graph, _draws)


def note_random_decisions(graph: Graph) -> None:
    """Let the checks of decisions by random numbers say in their errors that these are drawn. O(nodes)."""
    if branches_on_random(graph):
        for check in graph.find_nodes(op="call_function", target=check_decision):
            if _follows_from([check], _draws):
                check.args = (*check.args[:3], "drawn")


def _decides_by(graph: Graph, is_source: Callable[[Node], bool]) -> bool:
    return _follows_from(graph.find_nodes(op="call_function", target=check_decision), is_source)


def _follows_from(nodes: Iterable[Node], is_source: Callable[[Node], bool]) -> bool:
    left = list(nodes)
    seen = set(left)
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
