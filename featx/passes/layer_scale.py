"""Fold the factors by which the channels of a layer's result are multiplied into its weights."""

from __future__ import annotations

import operator
from typing import TypeAlias

import torch
from torch import nn

from featx.ir.node import Node
from featx.module import GraphModule, check_graph_module
from featx.passes.layers import Layers, add_layer, in_float64, parameter_like, scaled_by_outputs, with_weights
from featx.rewrite.unused import remove_unused_modules

_Layer: TypeAlias = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d
_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_MULTIPLICATIONS = (operator.mul, operator.imul, torch.mul, torch.multiply, "mul", "mul_", "multiply", "__imul__")


def fold_layer_scale(gm: GraphModule) -> bool:
    """Replace each linear layer or convolution, and a product with one factor for each channel, by one layer.

    The factors are a parameter or buffer of the model, such as the layer scale of ConvNeXt, CaiT and DINOv2. The node
    of the product goes, and the layer computes the product. The new layers are modules of `gm` alone; layers that the
    graph no longer calls leave `gm`, and whoever else has them is not touched. Weights are computed in float64 and
    rounded once; results differ by rounding, and no gradient reaches the factors.

    Left alone are layers that are called twice, have hooks, are of a class of their own, or are written or read by the
    graph; a layer that something besides the product reads; factors that the graph writes, and complex ones; and a
    product of another dtype than the layer returns, as under autocast in the graph. Returns whether anything was
    folded. O(nodes + edges + weights).
    """
    layers = Layers(check_graph_module(gm))
    found = [pair for node in gm.graph.nodes if (pair := _pair(gm, layers, node)) is not None]
    for product, layer, scale in found:
        one = layers.modules[layer]
        assert isinstance(one, _LAYERS)
        twin = with_weights(one, *_scaled(one, _tensor(gm, scale.target)))
        old, layer.target = layer.target, add_layer(gm, twin, layer.target, "scaled")
        product.replace_all_uses_with(layer)
        gm.graph.erase_node(product)
        if not scale.users:
            gm.graph.erase_node(scale)
        remove_unused_modules(gm, [old])
    return bool(found)


def _pair(gm: GraphModule, layers: Layers, node: Node) -> tuple[Node, Node, Node] | None:
    """Return a product with its layer and its factors."""
    if node.target not in _MULTIPLICATIONS or len(node.args) != 2 or node.kwargs:
        return None
    one, other = node.args
    if isinstance(one, Node) and one.op == "get_attr":
        one, other = other, one
    if not (isinstance(one, Node) and isinstance(other, Node)) or other.op != "get_attr" or one not in layers.modules:
        return None
    layer = layers.modules[one]
    if type(layer) not in _LAYERS or len(one.users) != 1 or layers.accesses.is_written(other):
        return None
    assert isinstance(layer, _LAYERS)
    scale = _tensor(gm, other.target)
    is_one_for_each_channel = _shape_of_factors(layer) == _without_ones_ahead(scale.shape)
    # A product with more dimensions than the layer returns has as many.
    dims = len(one.meta["shape"]) if "shape" in one.meta else len(_shape_of_factors(layer))
    is_in_mode = layers.modes.at(one) == layers.modes.at(node)
    same_dtype = scale.dtype == layer.weight.dtype and scale.device == layer.weight.device
    same_dtype = same_dtype and not scale.is_complex() and one.meta.get("dtype") == node.meta.get("dtype")
    if is_one_for_each_channel and scale.dim() <= dims and is_in_mode and same_dtype and layers.may_replace(one):
        return node, one, other
    return None


def _tensor(gm: GraphModule, path: str) -> torch.Tensor:
    value = operator.attrgetter(path)(gm)
    return value if isinstance(value, torch.Tensor) else torch.empty(0)


def _shape_of_factors(layer: _Layer) -> tuple[int, ...]:
    if isinstance(layer, nn.Linear):
        return (layer.out_features,)
    return (layer.out_channels, *(1,) * (layer.weight.dim() - 2))


def _without_ones_ahead(shape: torch.Size) -> tuple[int, ...]:
    sizes = list(shape)
    while len(sizes) > 1 and sizes[0] == 1:
        del sizes[0]
    return tuple(sizes)


def _scaled(layer: _Layer, scale: torch.Tensor) -> tuple[nn.Parameter, nn.Parameter | None]:
    factors = in_float64(scale).reshape(-1)
    weight = parameter_like(scaled_by_outputs(in_float64(layer.weight), factors), layer.weight)
    bias = None if layer.bias is None else parameter_like(in_float64(layer.bias) * factors, layer.bias)
    return weight, bias
