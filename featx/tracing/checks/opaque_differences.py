"""Tell whether a second call differs from the first one only inside modules that the first one kept whole."""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

from featx.ir.arguments import map_arg
from featx.ir.equality import is_same
from featx.ir.graph import Graph
from featx.ir.node import Node


def differ_only_inside_opaque(first: Graph, second: Graph) -> bool:
    """Say whether the graphs are the same outside of the modules that `first` calls as one node and `second` opens.

    A value that such a module gives in `first` matches each value of that module in `second` that has the same shape
    and dtype. Names do not count. O(nodes + edges).
    """
    paths = frozenset(node.target for node in first.nodes if "opaque_because" in node.meta)
    one, other = _calls_outside(first, paths), _calls_outside(second, paths)
    return len(one) == len(other) and all(is_same(*pair) for pair in zip(one, other, strict=True))


def _calls_outside(graph: Graph, paths: Collection[Any]) -> list[tuple[Any, ...]]:
    """Return the calls outside of the modules at `paths`, with the places of their arguments in place of nodes."""
    found: list[tuple[Any, ...]] = []
    places: dict[Node, tuple[Any, ...]] = {}
    for node in graph.nodes:
        inside = _module_of(node, paths)
        if inside is None and node.target is operator.getitem and places.get(node.args[0], ("call",))[0] == "module":
            inside = places[node.args[0]][1]  # a part of what the module gives
        if inside is not None:
            places[node] = ("module", inside, node.meta.get("shape"), node.meta.get("dtype"))
            continue
        places[node] = ("call", len(found))
        arguments = () if node.meta.get("is_form_check") else (node.args, node.kwargs)
        found.append((node.op, node.target, map_arg(arguments, places.__getitem__)))
    return found


def _module_of(node: Node, paths: Collection[Any]) -> Any:
    if node.op == "call_module" and node.target in paths:
        return node.target
    return next((path for path in node.meta.get("nn_module_stack", ()) if path in paths), None)
