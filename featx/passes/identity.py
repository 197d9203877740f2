"""Remove `nn.Identity`."""

from __future__ import annotations

from torch import nn

from featx.ir.node import Node
from featx.ir.operator_facts import first_argument
from featx.ir.repeatable import has_hooks
from featx.ir.rewiring import replace_inputs
from featx.module import GraphModule, check_graph_module
from featx.passes.accesses import Accesses


def remove_identity(gm: GraphModule) -> bool:
    """Let readers of an `nn.Identity` read its input instead, which is what it returns.

    Modules with hooks stay. Submodules of `gm` are not deleted. Returns whether anything was removed.
    O(nodes + edges).
    """
    effects = Accesses(check_graph_module(gm)).effects
    inputs: dict[Node, Node] = {}
    for node in gm.graph.nodes:
        replace_inputs(node, inputs)
        module = effects.module_of(node) if node.op == "call_module" else None
        source = first_argument(node.args, node.kwargs)
        is_plain = type(module) is nn.Identity and not has_hooks(module) and "forward" not in module.__dict__
        if is_plain and isinstance(source, Node):
            inputs[node] = source
    for node in reversed(inputs):
        gm.graph.erase_node(node)
    return bool(inputs)
