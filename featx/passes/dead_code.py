"""Erase the nodes whose absence changes nothing."""

from __future__ import annotations

from collections.abc import Callable

from featx.ir.node import Node
from featx.module import GraphModule, check_graph_module


def eliminate_dead_code(gm: GraphModule, is_impure_node: Callable[[Node], bool] | None = None) -> bool:
    """Erase from the graph of `gm` what changes neither its output nor anything that outlives the call.

    Modules are judged in their present mode: a dropout that nothing reads goes in eval mode, and stays in train mode,
    where it moves the generator. `is_impure_node` replaces the rule of `Graph.eliminate_dead_code`. Submodules stay,
    called or not. Returns whether anything was erased. O(nodes + edges).

    Raises:
        GraphError: the graph is malformed.
    """
    return check_graph_module(gm).graph.eliminate_dead_code(is_impure_node)
