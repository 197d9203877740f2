"""What nodes are computed from."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from featx.ir.node import Node


def _inputs_of(node: Node) -> Iterable[Node]:
    """Return all nodes that a node takes as arguments."""
    return node.all_input_nodes


def with_ancestors(nodes: Iterable[Node], sources_of: Callable[[Node], Iterable[Node]] = _inputs_of) -> set[Node]:
    """Return nodes, and all nodes that they are computed from. O(what is returned).

    `sources_of` says which of its arguments a node is computed from; by default it is all of them.
    """
    found: set[Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += sources_of(node)
    return found
