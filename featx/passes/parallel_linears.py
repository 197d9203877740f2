"""Compute linear layers of one input together."""

from __future__ import annotations

import operator
from typing import cast

import torch
from torch import nn

from featx.ir.node import Node
from featx.module import GraphModule, check_graph_module
from featx.passes.layers import Layers, add_layer, with_weights
from featx.rewrite.unused import remove_unused_modules


def merge_parallel_linears(gm: GraphModule) -> bool:
    """Replace linear layers that read one value, such as query, key and value of an attention, by one wider layer.

    What the layers gave are slices of its result along the last dimension, which are not contiguous. The new layers
    are modules of `gm` alone; layers that the graph no longer calls leave `gm`, and whoever else has them is not
    touched. Results may differ by rounding.

    Left alone are layers that are called twice, have hooks, are of a class of their own, or are written or read by the
    graph; and inputs and results that are written. Returns whether anything was merged. O(nodes + edges + weights).
    """
    layers = Layers(check_graph_module(gm))
    groups: dict[object, list[Node]] = {}
    for node, module in layers.modules.items():
        if type(module) is nn.Linear and len(node.args) == 1 and not node.kwargs and layers.may_replace(node):
            source = node.args[0]
            is_written = layers.accesses.is_written(node)  # autograd refuses to write into one of several views
            if isinstance(source, Node) and not is_written and not layers.accesses.is_written(source):
                weight = module.weight
                alike = (
                    layers.modes.at(node),
                    tuple((name, tensor.requires_grad) for name, tensor in _tensors(module).items()),
                    weight.dtype,
                    weight.device,
                    module.in_features,
                )
                groups.setdefault((source, *alike), []).append(node)
    together = [nodes for nodes in groups.values() if len(nodes) > 1]
    paths = [node.target for nodes in together for node in nodes]
    for nodes in together:
        _merge(gm, nodes, [cast(nn.Linear, layers.modules[node]) for node in nodes])
    remove_unused_modules(gm, paths)
    return bool(together)


def _tensors(layer: nn.Linear) -> dict[str, nn.Parameter]:
    return dict(layer.named_parameters())


def _merge(gm: GraphModule, nodes: list[Node], layers: list[nn.Linear]) -> None:
    first = nodes[0]
    weight = nn.Parameter(torch.cat([layer.weight.detach() for layer in layers]), layers[0].weight.requires_grad)
    biases = [_tensors(layer)["bias"].detach() for layer in layers if "bias" in _tensors(layer)]
    bias = nn.Parameter(torch.cat(biases), layers[0].bias.requires_grad) if biases else None
    wide = with_weights(layers[0], weight, bias)
    wide.out_features = len(weight)
    path = add_layer(gm, wide, first.target, "merged")
    with gm.graph.inserting_before(first):
        result = gm.graph.call_module(path, first.args)
        parts = gm.graph.call_function(torch.split, (result, [layer.out_features for layer in layers], -1))
        for index, node in enumerate(nodes):
            part = gm.graph.call_function(operator.getitem, (parts, index))
            part.meta.update({key: value for key, value in node.meta.items() if key != "effects"})
            node.replace_all_uses_with(part)
            gm.graph.erase_node(node)
