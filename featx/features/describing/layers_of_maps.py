"""Which values are maps by the layers that make them, whatever the size of the image is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from featx.ir.node import Node

# Layers that take and return channels first, by the number of dimensions of their values.
_LAYERS: dict[int, tuple[type[nn.Module], ...]] = {
    4: (nn.Conv2d, nn.ConvTranspose2d, nn.BatchNorm2d),
    5: (nn.Conv3d, nn.ConvTranspose3d, nn.BatchNorm3d),
}


def has_channels_first(
    node: Node, shape: tuple[int, ...], module: nn.Module | None, modules: Mapping[str, nn.Module]
) -> bool:
    """Say whether layers show that a value has its channels in the second dimension: they have so many channels.

    These are the layers of the module that returns it, or else of the nearest one ahead from which operations lead to
    the value that keep its shape; other dimensions must have other lengths, so that these cannot have turned it.
    O(nodes + modules).

    Args:
        node: what computes the value.
        shape: that of the value.
        module: the module that returns it, if one does.
        modules: those of the model by path.
    """
    kinds = _LAYERS.get(len(shape))
    if kinds is not None and shape.count(shape[1]) > 1:
        return False
    ahead: Node | None = node
    while kinds is not None and ahead is not None:
        if module is None and ahead.op == "call_module":
            module = modules.get(str(ahead.target))
        layers = [] if module is None else list(module.modules())
        if any(isinstance(layer, kinds) for layer in layers):
            widths = set(map(_width_of, layers))
            return shape[1] in widths and shape[-1] not in widths
        ahead = next((each for each in ahead.all_input_nodes if tuple(each.meta.get("shape", ())) == shape), None)
        module = None
    return False


def _width_of(layer: nn.Module) -> Any:
    """Return how many channels or features a layer returns; None where that is not known of its class."""
    if isinstance(layer, nn.LayerNorm):
        return layer.normalized_shape[-1]
    names = ("out_channels", "num_features", "out_features")
    return next((layer.__dict__[name] for name in names if name in layer.__dict__), None)
