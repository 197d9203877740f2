"""Mark in a graph what modules returned, for those who ask for the value of a module that was traced through."""

from __future__ import annotations

from typing import Any

from featx.ir.arguments import Argument
from featx.ir.effects import MeasuredEffects
from featx.ir.graph import Graph
from featx.ir.node import Node


def module_output(value: Any) -> Any:
    """Return `value`: where a graph calls this, a module has returned it."""
    return value


def node_that_made(node: Node) -> Node:
    """Return the node behind marks that a module has returned its value."""
    while node.target is module_output and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


def mark_output(graph: Graph, value: Argument, path: str, last: Node | None = None) -> None:
    """Note that the module at `path` has returned `value` after the node `last`, by default at the end of `graph`.

    The path goes into `meta["returned_by"]` of the node that gave the value, if that is the last one, as what comes
    after it may write into the value; else into that of a new one. Guards, and what they ask, may come between the
    value and its return. They decide that it is returned as it is, and have `meta["is_ahead_of_return"]`.
    """
    last = last or graph.root.prev
    between: list[Node] = []
    while last is not value and _is_for_guards(last):
        between.append(last)
        last = last.prev
    if not isinstance(value, Node) or value is not last:
        last = _add(graph, value)
    else:
        for node in between:
            node.meta["is_ahead_of_return"] = True
    last.meta["returned_by"] = (*last.meta.get("returned_by", ()), path)


def add_apart(graph: Graph, value: Argument, path: str | None = None) -> Node:
    """Add a node whose users are those of what a module has returned, and not of `value` elsewhere.

    Args:
        graph: is changed.
        value: what the module has returned.
        path: that of a module which is traced through. Without it, `value` is the call of a module that is one node.
    """
    node = _add(graph, value)
    node.meta["is_apart"] = True
    if path is not None:
        node.meta["returned_by"] = (path,)
    else:
        node.meta["is_apart_from_call"] = True
    return node


def returned_apart(call: Node) -> Node:
    """Return the node of what a call has returned, where a graph tells that from the value of the call elsewhere."""
    return next((user for user in call.users if user.meta.get("is_apart_from_call") and user.args[0] is call), call)


def _add(graph: Graph, value: Argument) -> Node:
    node = graph.call_function(module_output, (value,))
    node.meta["effects"] = MeasuredEffects(shares=tuple(range(len(node.all_input_nodes))))
    return node


def guards_ahead_of_return(value: Node) -> list[Node]:
    """Return the guards between a value and its return, and what they ask."""
    found: list[Node] = []
    node = value.next
    while node.meta.get("is_ahead_of_return"):
        found.append(node)
        node = node.next
    return found


def _is_for_guards(node: Node) -> bool:
    """Say whether a node is a guard, or a question that guards alone ask: neither writes anything."""
    if node.meta.get("is_guard"):
        return True
    return bool(node.users) and all(user.meta.get("is_guard") for user in node.users)
