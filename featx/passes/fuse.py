"""Fold batch norms into the convolutions and linear layers before them."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import nn

from featx.errors import PassError
from featx.ir.node import Node
from featx.module import GraphModule, check_graph_module
from featx.passes.layers import Layers, add_layer, in_float64, parameter_like, scaled_by_outputs, with_weights
from featx.rewrite.unused import remove_unused_modules
from featx.tracing.guards.forms import form_of
from featx.tracing.guards.guards import add_check, check_form, require_mode

_Layer: TypeAlias = (
    nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d | nn.Linear
)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, *_TRANSPOSED, nn.Linear)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_NORM_OF: dict[type[nn.Module], type[nn.Module]] = {
    nn.Conv1d: nn.BatchNorm1d,
    nn.Conv2d: nn.BatchNorm2d,
    nn.Conv3d: nn.BatchNorm3d,
    nn.ConvTranspose1d: nn.BatchNorm1d,
    nn.ConvTranspose2d: nn.BatchNorm2d,
    nn.ConvTranspose3d: nn.BatchNorm3d,
    nn.Linear: nn.BatchNorm1d,
}


def fuse_conv_bn(gm: GraphModule) -> bool:
    """Replace each convolution (or linear layer) and the batch norm after it by one layer with fused weights.

    The new layers are modules of `gm` alone, `layer1_0_conv1_fused` for `layer1.0.conv1`; layers that the graph no
    longer calls leave `gm`, and whoever else has them is not touched. The node of the norm stays and stands for both.
    Weights are computed in float64 and rounded once; results differ from the unfused ones by rounding.

    Left alone are modules that are called twice, have hooks, are of a class of their own, or are written or read by
    the graph; a layer that something besides the norm reads; and norms in train mode or without running statistics. A
    `BatchNorm1d` normalizes another dimension of an input with one dimension more or less, so the graph checks that
    its input has the usual number. It also checks that `gm` stays in eval mode. Returns whether anything was fused.
    O(nodes + edges + weights).

    Raises:
        PassError: `gm` is in train mode.
    """
    if check_graph_module(gm).training:
        raise PassError(
            f"fuse_conv_bn of {gm._get_name()} in train mode, in which batch norms use the statistics of the batch; "
            "call eval() on it first"
        )
    pairs = _Pairs(gm).find()
    paths = [node.target for pair in pairs for node in pair]
    for layer, norm in pairs:
        _fuse(gm, layer, norm)
    if pairs:
        require_mode(gm.graph, gm.training, "batch norms were fused: make the graph anew for the other mode")
        remove_unused_modules(gm, paths)
    return bool(pairs)


class _Pairs:
    """Finds the layers and norms of `gm` that can be one layer."""

    def __init__(self, gm: GraphModule) -> None:
        self._layers = Layers(gm)
        self._modules = self._layers.modules

    def find(self) -> list[tuple[Node, Node]]:
        """Return the pairs in graph order."""
        pairs = [(node.all_input_nodes[0], node) for node in self._modules if len(node.all_input_nodes) == 1]
        return [pair for pair in pairs if self._is_pair(*pair)]

    def _is_pair(self, layer: Node, norm: Node) -> bool:
        one, other = self._modules.get(layer), self._modules.get(norm)
        if one is None or not isinstance(other, _NORMS) or _NORM_OF.get(type(one)) is not type(other):
            return False
        return (
            len(layer.users) == 1
            and not other.training
            and other.running_mean is not None
            and _channels(one) == other.num_features
            and _has_usual_form(layer, one)
            and self._layers.modes.at(layer) == self._layers.modes.at(norm)
            and self._layers.may_replace(layer)
            and self._layers.may_replace(norm)
        )


def _fuse(gm: GraphModule, layer: Node, norm: Node) -> None:
    """Let `norm` call a new layer that does what both did, and erase `layer`."""
    one, other = gm.get_submodule(layer.target), gm.get_submodule(norm.target)
    name = add_layer(gm, _fused(one, other), layer.target, "fused")
    if isinstance(other, nn.BatchNorm1d):
        value = layer.args[0] if layer.args else layer.kwargs["input"]
        form = form_of(torch.empty((0,) * _usual_rank(one)))
        with gm.graph.inserting_before(layer):
            what = f"the input of '{layer.name}', which '{norm.name}' was fused with"
            add_check(gm.graph, check_form, value, form, what)
    # Not at the place of the norm: the input of the layer may have been overwritten there.
    layer.append(norm)
    norm.target, norm.args, norm.kwargs = name, layer.args, layer.kwargs
    gm.graph.erase_node(layer)


def _fused(layer: nn.Module, norm: nn.Module) -> nn.Module:
    """Return a copy of `layer` whose weights do what `norm` does as well."""
    assert isinstance(layer, _LAYERS)
    assert isinstance(norm, _NORMS)
    assert norm.running_mean is not None
    assert norm.running_var is not None
    scale = (in_float64(norm.running_var) + norm.eps).rsqrt()
    weight, bias = norm._parameters.get("weight"), norm._parameters.get("bias")  # each may be None
    if weight is not None:
        scale = scale * in_float64(weight)
    mean = in_float64(norm.running_mean)
    shift = (-mean if layer.bias is None else in_float64(layer.bias) - mean) * scale
    if bias is not None:
        shift = shift + in_float64(bias)
    scaled = parameter_like(_scaled(layer, scale), layer.weight)
    return with_weights(layer, scaled, parameter_like(shift, layer.weight if layer.bias is None else layer.bias))


def _scaled(layer: _Layer, scale: torch.Tensor) -> torch.Tensor:
    """Return the weight of `layer` with each output channel scaled."""
    weight = in_float64(layer.weight)
    if not isinstance(layer, _TRANSPOSED):
        return scaled_by_outputs(weight, scale)
    # The weight is (inputs, outputs of a group, ...), and the inputs of a group stand together.
    rows = scale.reshape(layer.groups, -1).repeat_interleave(weight.shape[0] // layer.groups, dim=0)
    return weight * rows.reshape(*rows.shape, *(1,) * (weight.dim() - 2))


def _usual_rank(layer: nn.Module) -> int:
    return 2 if isinstance(layer, nn.Linear) else 3


def _has_usual_form(node: Node, layer: nn.Module) -> bool:
    shape = node.meta.get("shape")
    return shape is None or _NORM_OF[type(layer)] is not nn.BatchNorm1d or len(shape) == _usual_rank(layer)


def _channels(layer: nn.Module) -> int:
    assert isinstance(layer, _LAYERS)
    return layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels
