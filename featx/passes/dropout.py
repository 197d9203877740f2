"""Remove dropout that drops nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from featx.ir.node import Node
from featx.ir.operator_facts import first_argument
from featx.ir.repeatable import has_hooks
from featx.ir.rewiring import replace_inputs
from featx.ir.torch_layers import DROPOUTS
from featx.module import GraphModule, check_graph_module
from featx.passes.accesses import Accesses
from featx.tracing.guards.guards import require_mode

# Each with the position and the name of the argument that says whether it is training, and with its default.
_FUNCTIONS: dict[Any, tuple[int, str, bool]] = {
    functional.dropout: (2, "training", True),
    functional.dropout1d: (2, "training", True),
    functional.dropout2d: (2, "training", True),
    functional.dropout3d: (2, "training", True),
    functional.alpha_dropout: (2, "training", False),
    functional.feature_alpha_dropout: (2, "training", False),
    torch.dropout: (2, "train", True),
    torch.dropout_: (2, "train", True),
    torch.alpha_dropout: (2, "train", True),
    torch.alpha_dropout_: (2, "train", True),
    torch.feature_dropout: (2, "train", True),
    torch.feature_dropout_: (2, "train", True),
    torch.feature_alpha_dropout: (2, "train", True),
    torch.feature_alpha_dropout_: (2, "train", True),
}
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
    position, name, default = _FUNCTIONS[node.target]
    training = node.args[position] if len(node.args) > position else node.kwargs.get(name, default)
    return node.target if training is False else None
