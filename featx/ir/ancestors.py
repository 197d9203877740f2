"""What nodes are computed from."""

from __future__ import annotations

from collections.abc import Iterable

from featx.ir.form import sources_of_values
from featx.ir.node import Node


def with_ancestors(nodes: Iterable[Node], *, of_values: bool = False) -> set[Node]:
    """Return nodes, and all nodes that they are computed from. O(what is returned).

    With `of_values`, not those of which the form alone is used: `torch.arange(n, device=x.device)` takes no value of x.
    """
    found: set[Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += sources_of_values(node) if of_values else node.all_input_nodes
    return found
