"""What each node of a graph sees in an image: small pictures of the maps that it computes."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import adaptive_avg_pool2d

from featx.drawing.components import principal_components
from featx.examples import Example
from featx.features.describing.images import ImageInput, images_of
from featx.features.describing.info import infos_of
from featx.features.describing.known_model import KnownModel
from featx.interpret.interpreter import Interpreter
from featx.ir.node import Node
from featx.module import GraphModule

# The longest side of a picture. A place of a map is a pixel where it has fewer.
_LONGEST = 40
_MOST_CHANNELS = 4096


@dataclass(frozen=True)
class Thumbnail:
    """A small picture: `pixels` are red, green and blue, a byte each, row by row."""

    width: int
    height: int
    pixels: bytes


def thumbnails_of(gm: GraphModule, example: Example, model: nn.Module) -> dict[Node, Thumbnail]:
    """Run a graph on inputs with values, and return pictures of the maps of the first sample, by node.

    A map is a value with places of the image, or with tokens for its patches. It costs a run, and a decomposition of
    a matrix of channels by channels for each map.

    Args:
        gm: what is run, without gradients.
        example: its inputs, one of them an image.
        model: the module that was traced; it says which tokens are no patches.
    """
    images = images_of(example, inspect.signature(gm.forward))
    if not images:
        return {}
    run = _Run(gm, model, images[0])
    with torch.no_grad():
        run.run(*example.args, **example.kwargs)
    return run.found


class _Run(Interpreter):
    """Makes a picture of each map when it is computed."""

    def __init__(self, gm: GraphModule, model: nn.Module, image: ImageInput) -> None:
        super().__init__(gm)
        self.found: dict[Node, Thumbnail] = {}
        self._image = image
        nodes = {node.name: node for node in gm.graph.nodes if "shape" in node.meta}
        names = {node.meta.get("qualified_name", name): name for name, node in nodes.items()}
        names.update({name: name for name in nodes.keys() - set(names.values())})
        self._infos = {info.key: info for info in infos_of(nodes, names, KnownModel(model), [image])}

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if isinstance(result, torch.Tensor) and result.dim() in (3, 4) and result.is_floating_point():
            picture = self._picture(n, result)
            if picture is not None:
                self.found[n] = picture
        return result

    def _picture(self, node: Node, value: torch.Tensor) -> Thumbnail | None:
        info = self._infos.get(node.name)
        if info is None or info.layout is None or info.stride is None or info.shape != tuple(value.shape):
            return None
        if info.layout == "NLC":
            if type(info.stride) is not int:
                return None
            sides = [size // info.stride for size in self._image.sizes]
            if len(sides) != 2 or math.prod(sides) != value.shape[1] - info.prefix_tokens:  # patches that overlap
                return None
            value = value[:1, info.prefix_tokens :].transpose(1, 2).unflatten(2, sides)
        elif info.layout in ("NCHW", "NHWC"):
            value = value[:1] if info.layout == "NCHW" else value[:1].permute(0, 3, 1, 2)
        else:  # a signal, or columns of a map
            return None
        height, width = value.shape[2:]
        if min(height, width) < 2 or value.shape[1] > _MOST_CHANNELS or not bool(value.isfinite().all()):
            return None
        scale = min(1.0, _LONGEST / max(height, width))
        small = adaptive_avg_pool2d(value.float(), (max(1, round(height * scale)), max(1, round(width * scale))))
        is_photo = node.op == "placeholder" and small.shape[1] == 3
        shown = _scaled(small) if is_photo else principal_components(small)
        pixels = (shown[0] * 255).round().to(torch.uint8).permute(1, 2, 0).contiguous()
        return Thumbnail(small.shape[3], small.shape[2], bytes(pixels.flatten().tolist()))


def _scaled(images: torch.Tensor) -> torch.Tensor:
    low, high = images.amin(), images.amax()
    return (images - low) / (high - low).clamp(min=1e-12)
