"""Compute linear layers of one input together."""

from __future__ import annotations

import operator
from typing import cast

import torch
from torch import nn

from featx.ir.node import Node
from featx.ir.operator_facts import name_of
from featx.ir.repeatable import has_hooks
from featx.ir.torch_layers import is_torch_layer
from featx.module import GraphModule, check_graph_module
from featx.passes.layers import Layers, add_layer, with_weights
from featx.rewrite.unused import remove_unused_modules

# What raises for a tensor of other strides, or returns something else.
_ASKING_FOR_STRIDES = frozenset(
    "view view_as view_as_complex _unsafe_view as_strided as_strided_ stride is_contiguous storage_offset "
    "data_ptr untyped_storage storage numpy __array__".split()
)


def merge_parallel_linears(gm: GraphModule) -> bool:
    """Replace linear layers that read one value, such as query, key and value of an attention, by one wider layer.

    What the layers gave are slices of its result along the last dimension, which are not contiguous: `view` of them
    becomes `reshape`, and what the graph returns of them has other strides. The new layers are modules of `gm` alone;
    layers that the graph no longer calls leave `gm`, and whoever else has them is not touched. Results may differ by
    rounding.

    Left alone are layers that are called twice, have hooks, are of a class of their own, or are written or read by the
    graph; inputs and results that are written; and results that code gets which may depend on their strides. Returns
    whether anything was merged. O(nodes + edges + weights).
    """
    layers = Layers(check_graph_module(gm))
    groups: dict[object, list[Node]] = {}
    for node, module in layers.modules.items():
        if type(module) is nn.Linear and len(node.args) == 1 and not node.kwargs and layers.may_replace(node):
            source = node.args[0]
            is_written = layers.accesses.is_written(node)  # autograd refuses to write into one of several views
            is_free = not is_written and _may_have_other_strides(node, layers)
            if isinstance(source, Node) and is_free and not layers.accesses.is_written(source):
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
        _merge(gm, nodes, layers)
    remove_unused_modules(gm, paths)
    return bool(together)


def _readers(node: Node, layers: Layers) -> list[Node]:
    """Return what reads the value of a node, or memory of it through a view."""
    found: dict[Node, None] = {}
    pending = [node]
    while pending:
        value = pending.pop()
        for user in value.users:
            if user not in found:
                found[user] = None
                pending += [user] if value in layers.accesses.effects.of(user).shares else []
    return list(found)


def _may_have_other_strides(node: Node, layers: Layers) -> bool:
    """Say whether all that reads the value of a node, or a view of it, takes a tensor of any strides."""
    return all(_takes_any_strides(reader, layers) for reader in _readers(node, layers))


def _takes_any_strides(reader: Node, layers: Layers) -> bool:
    if reader.op == "call_module":
        module = layers.modules.get(reader)
        return module is not None and is_torch_layer(type(module)) and not has_hooks(module)
    if layers.accesses.effects.of(reader).is_opaque:
        return False
    return _is_view(reader) or name_of(reader.target).partition(".")[0] not in _ASKING_FOR_STRIDES


def _is_view(node: Node) -> bool:
    """Say whether a node is `x.view(2, -1)`, in place of which `reshape` gives the same values."""
    of_dtype = any(isinstance(each, torch.dtype) for each in node.args)
    return node.op == "call_method" and node.target == "view" and not node.kwargs and not of_dtype


def _tensors(layer: nn.Linear) -> dict[str, nn.Parameter]:
    return dict(layer.named_parameters())


def _merge(gm: GraphModule, nodes: list[Node], all_layers: Layers) -> None:
    first = nodes[0]
    layers = [cast(nn.Linear, all_layers.modules[node]) for node in nodes]
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
            for reader in filter(_is_view, _readers(node, all_layers)):
                reader.target = "reshape"
            part.meta.update({key: value for key, value in node.meta.items() if key != "effects"})
            node.replace_all_uses_with(part)
            gm.graph.erase_node(node)
