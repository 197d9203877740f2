"""Layers of a graph module that a pass may replace by others, and how these are made."""

from __future__ import annotations

import copy
from typing import TypeVar

import torch
from torch import nn

from featx.ir.names import identifier_of
from featx.ir.node import Node
from featx.ir.repeatable import has_hooks
from featx.module import GraphModule
from featx.passes.accesses import Accesses
from featx.passes.modes import Modes

_Layer = TypeVar("_Layer", bound=nn.Module)


class Layers:
    """The modules that the graph of `gm` calls, as it is now. Make a new object after editing. O(nodes + edges)."""

    def __init__(self, gm: GraphModule) -> None:
        self.accesses = Accesses(gm)
        self.modes = Modes(gm.graph, self.accesses)
        self.modules: dict[Node, nn.Module] = {}
        self._calls: dict[nn.Module, int] = {}
        for node in gm.graph.find_nodes(op="call_module"):
            module = self.accesses.effects.module_of(node)
            if module is not None:
                self.modules[node] = module
                self._calls[module] = self._calls.get(module, 0) + 1

    def may_replace(self, node: Node) -> bool:
        """Say whether another module may do what the call of `node` does.

        It may not where the module is called twice, has hooks or a `forward` of its own, or is written.
        """
        module = self.modules[node]
        return (
            self._calls[module] == 1
            and not has_hooks(module)
            and "forward" not in module.__dict__
            and not self.accesses.is_state_written(node)
        )


def add_layer(gm: GraphModule, layer: nn.Module, path: str, suffix: str) -> str:
    """Let `gm` have `layer`, named after the path of the one that it is made of; return its path."""
    name = f"{identifier_of(path)}_{suffix}"
    while hasattr(gm, name):
        name += "_"
    gm.add_module(name, layer)
    return name


def with_weights(layer: _Layer, weight: nn.Parameter, bias: nn.Parameter | None) -> _Layer:
    """Return a copy of a convolution or a linear layer that has other weights."""
    # The memo says what the copy has in place of the weights, so that these are not copied.
    # Where there is no bias, None is not for the memo: a layer may hold it elsewhere.
    own = layer._parameters
    replaced = {id(own[name]): new for name, new in (("weight", weight), ("bias", bias)) if own[name] is not None}
    twin = copy.deepcopy(layer, replaced)
    twin.register_parameter("weight", weight)
    twin.register_parameter("bias", bias)
    return twin


def in_float64(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of a tensor in float64, so that weights are rounded once."""
    device = "cpu" if tensor.device.type == "mps" else tensor.device  # which has no float64
    return tensor.detach().to(device, torch.float64)


def parameter_like(value: torch.Tensor, like: torch.Tensor) -> nn.Parameter:
    """Return `value` with the dtype and device of `like`, and with its strides where the shape is the same."""
    memory = torch.empty_like(like) if value.shape == like.shape else like.new_empty(value.shape)
    return nn.Parameter(memory.detach().copy_(value), like.requires_grad)


def scaled_by_outputs(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the weight of a linear layer, or of a convolution that is not transposed, with its outputs scaled."""
    return weight * scale.reshape(-1, *(1,) * (weight.dim() - 1))
