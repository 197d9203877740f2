"""Remove dropout that drops nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from featx.ir.node import Node
from featx.ir.operator_facts import draws_now, first_argument, name_of
from featx.ir.repeatable import has_hooks
from featx.ir.rewiring import replace_inputs
from featx.ir.torch_layers import DROPOUTS
from featx.module import GraphModule, check_graph_module
from featx.passes.accesses import Accesses
from featx.tracing.guards.guards import require_mode

_FUNCTIONS: set[Any] = {
    functional.dropout, functional.dropout1d, functional.dropout2d, functional.dropout3d, functional.alpha_dropout,
    functional.feature_alpha_dropout, torch.dropout, torch.dropout_, torch.alpha_dropout, torch.alpha_dropout_,
    torch.feature_dropout, torch.feature_dropout_, torch.feature_alpha_dropout, torch.feature_alpha_dropout_,
}  # fmt: skip
# Those that may give another view of an input, not the input itself.
_MAY_RESHAPE = {nn.Dropout1d, nn.Dropout2d, nn.Dropout3d} | {
    functional.dropout1d, functional.dropout2d, functional.dropout3d
}  # fmt: skip


def remove_dropout(gm: GraphModule) -> bool:
    """Let readers of a dropout that drops nothing read its input instead.

    Removed are functions of torch that are called with `training=False`, and torch's dropout modules in eval mode, if
    `gm` is in eval mode too; then the graph checks the mode from then on. Modules with hooks stay, and so do dropouts
    that work on channels where their result is written in place. Submodules of `gm` are not deleted. Returns whether
    anything was removed. O(nodes + edges).
    """
    accesses = Accesses(check_graph_module(gm))
    inputs: dict[Node, Node] = {}
    used_mode = False
    for node in gm.graph.nodes:
        replace_inputs(node, inputs)
        kind = _kind_of(gm, node, accesses.effects.module_of(node) if node.op == "call_module" else None)
        source = first_argument(node.args, node.kwargs)
        if kind is None or not isinstance(source, Node) or (kind in _MAY_RESHAPE and accesses.is_written(node)):
            continue
        inputs[node] = source
        used_mode = used_mode or node.op == "call_module"
    for node in reversed(inputs):
        gm.graph.erase_node(node)
    if used_mode:
        require_mode(gm.graph, gm.training, "dropout was removed: make the graph anew for the other mode")
    return bool(inputs)


def _kind_of(gm: GraphModule, node: Node, module: nn.Module | None) -> Any:
    """Return the class or function of a dropout that drops nothing, None for another node."""
    if module is not None:
        is_off = not gm.training and not module.training and not has_hooks(module) and "forward" not in module.__dict__
        return type(module) if type(module) in DROPOUTS and is_off else None
    if node.op != "call_function" or node.target not in _FUNCTIONS:
        return None
    return None if draws_now(name_of(node.target), node.args, node.kwargs) else node.target
