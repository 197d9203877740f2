"""Find nodes of a graph module by the names that people have for them, and name nodes in errors."""

from __future__ import annotations

from collections.abc import Iterable

from featx.errors import ForeignNodeError, NodeNameError
from featx.ir.node import Node
from featx.ir.paths import did_you_mean, parents_of
from featx.module import GraphModule


def find_nodes(gm: GraphModule, wanted: str | Node | Iterable[str | Node]) -> list[Node]:
    """Return the wanted nodes, in the order in which they are asked for.

    A string is the name of a node, or else its qualified name, the path of a module that it calls, or a path under
    which it is the last node. O(nodes * depth).

    Raises:
        NodeNameError: there is no such node.
        ForeignNodeError: a node is not in the graph of `gm`, or is its output.
    """
    names: dict[str, Node] | None = None
    found: list[Node] = []
    for item in [wanted] if isinstance(wanted, (str, Node)) else wanted:
        if isinstance(item, Node):
            if item.graph is not gm.graph or item.is_erased or item.op == "output":
                raise ForeignNodeError(f"node '{item.name}' computes no value in the graph of this {gm._get_name()}")
            found.append(item)
            continue
        if names is None:
            names = _names(gm)
        if item not in names:
            hint = did_you_mean(item, names)
            raise NodeNameError(f"No node '{item}' in {gm._get_name()}.{hint} List all: print(gm.graph).")
        found.append(names[item])
    return found


def quoted(node: Node) -> str:
    """Return the name of `node` as an error prints it, with its line in the model where the tracer left that."""
    source = node.meta.get("source")
    return f"'{node.name}' at {source}" if source else f"'{node.name}'"


def _names(gm: GraphModule) -> dict[str, Node]:
    exact = {node.name: node for node in gm.graph.nodes if node.op != "output"}
    qualified: dict[str, Node] = {}
    last_under: dict[str, Node] = {}
    for node in gm.graph.nodes:
        path: str | None = node.meta.get("qualified_name") or (node.target if node.op == "call_module" else None)
        if path is None or node.op == "output":
            continue
        qualified[path] = node
        last_under.update(dict.fromkeys(parents_of(path), node))
    return {**last_under, **qualified, **exact}
