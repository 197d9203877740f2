"""Fold batch norms into the convolutions and linear layers ahead of them."""

from __future__ import annotations

import copy
from typing import TypeAlias

import torch
from torch import nn

from featx.errors import PassError
from featx.ir.names import identifier_of
from featx.ir.node import Node
from featx.ir.repeatable import has_hooks
from featx.module import GraphModule, check_graph_module
from featx.passes.accesses import Accesses
from featx.passes.modes import Modes
from featx.rewrite.unused import remove_unused_modules
from featx.tracing.guards.forms import form_of
from featx.tracing.guards.guards import check_form, require_mode

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
    """Replace each convolution (or linear layer) and the batch norm behind it by one layer with fused weights.

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
        self._accesses = Accesses(gm)
        self._modes = Modes(gm.graph, self._accesses)
        self._modules: dict[Node, nn.Module] = {}
        self._calls: dict[nn.Module, int] = {}
        for node in gm.graph.nodes:
            module = self._accesses.effects.module_of(node) if node.op == "call_module" else None
            if module is not None:
                self._modules[node] = module
                self._calls[module] = self._calls.get(module, 0) + 1

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
            and self._modes.at(layer) == self._modes.at(norm)
            and all(self._is_free(node, module) for node, module in ((layer, one), (norm, other)))
        )

    def _is_free(self, node: Node, module: nn.Module) -> bool:
        return (
            self._calls[module] == 1
            and not has_hooks(module)
            and "forward" not in module.__dict__
            and not self._accesses.is_state_written(node)
        )


def _fuse(gm: GraphModule, layer: Node, norm: Node) -> None:
    """Let `norm` call a new layer that does what both did, and erase `layer`."""
    one, other = gm.get_submodule(layer.target), gm.get_submodule(norm.target)
    name = f"{identifier_of(layer.target)}_fused"
    while hasattr(gm, name):
        name += "_"
    gm.add_module(name, _fused(one, other))
    if isinstance(other, nn.BatchNorm1d):
        value = layer.args[0] if layer.args else layer.kwargs["input"]
        form = form_of(torch.empty((0,) * _usual_rank(one)))
        with gm.graph.inserting_before(layer):
            what = f"the input of '{layer.name}', which '{norm.name}' was fused with"
            check = gm.graph.call_function(check_form, (value, form, what))
        check.meta["is_guard"] = True
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
    scale = (_exact(norm.running_var) + norm.eps).rsqrt()
    if norm.affine:
        scale = scale * _exact(norm.weight)
    shift = -_exact(norm.running_mean) if layer.bias is None else _exact(layer.bias) - _exact(norm.running_mean)
    shift = shift * scale
    if norm.affine:
        shift = shift + _exact(norm.bias)
    weight = _parameter(_exact(layer.weight) * _for_outputs_of(layer, scale), layer.weight)
    bias = _parameter(shift, layer.weight if layer.bias is None else layer.bias)
    # The memo says what the copy has in place of the weights, so that these are not copied.
    twin = copy.deepcopy(layer, {id(layer.weight): weight, id(layer.bias): bias})
    twin.bias = bias
    return twin


def _for_outputs_of(layer: _Layer, scale: torch.Tensor) -> torch.Tensor:
    """Return `scale`, a factor for each output channel, in a form that multiplies the weight of `layer`."""
    weight = layer.weight
    if isinstance(layer, _TRANSPOSED):
        # The weight is (inputs, outputs of a group, ...), and the inputs of a group stand together.
        rows = scale.reshape(layer.groups, -1).repeat_interleave(weight.shape[0] // layer.groups, dim=0)
        return rows.reshape(*rows.shape, *(1,) * (weight.dim() - 2))
    return scale.reshape(-1, *(1,) * (weight.dim() - 1))


def _exact(tensor: torch.Tensor) -> torch.Tensor:
    device = "cpu" if tensor.device.type == "mps" else tensor.device  # which has no float64
    return tensor.detach().to(device, torch.float64)


def _parameter(value: torch.Tensor, like: torch.Tensor) -> nn.Parameter:
    """Return `value` with the dtype and device of `like`, and with its strides where the shape is the same."""
    memory = torch.empty_like(like) if value.shape == like.shape else like.new_empty(value.shape)
    return nn.Parameter(memory.detach().copy_(value), like.requires_grad)


def _usual_rank(layer: nn.Module) -> int:
    return 2 if isinstance(layer, nn.Linear) else 3


def _has_usual_form(node: Node, layer: nn.Module) -> bool:
    shape = node.meta.get("shape")
    return shape is None or _NORM_OF[type(layer)] is not nn.BatchNorm1d or len(shape) == _usual_rank(layer)


def _channels(layer: nn.Module) -> int:
    assert isinstance(layer, _LAYERS)
    return layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels
