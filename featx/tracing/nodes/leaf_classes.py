"""Which modules are one node by default."""

from __future__ import annotations

import torch
from torch import nn

from featx.ir.graph import Graph
from featx.ir.runtime_checks import is_runtime_check


def is_leaf_class(kind: type[nn.Module]) -> bool:
    """Say whether modules of a class are one node by default: torch.nn's except Sequential, and scripted ones."""
    is_of_torch = kind.__module__.startswith(("torch.nn", "torch.ao.nn"))
    return issubclass(kind, torch.jit.ScriptModule) or (is_of_torch and not issubclass(kind, nn.Sequential))


def checks_inputs(module: nn.Module) -> bool:
    """Say whether a module runs a graph that checks its inputs against an example: proxies would not pass."""
    graph = getattr(module, "graph", None)
    return isinstance(graph, Graph) and any(
        is_runtime_check(node.target) and node.all_input_nodes[0].op == "placeholder"
        for node in graph.nodes
        if node.op == "call_function" and node.all_input_nodes
    )
