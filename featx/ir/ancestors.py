"""What nodes are computed from."""

from __future__ import annotations

from collections.abc import Iterable

from featx.ir.node import Node


def with_ancestors(nodes: Iterable[Node]) -> set[Node]:
    """Return nodes, and all nodes that they are computed from. O(what is returned)."""
    found: set[Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += node.all_input_nodes
    return found
