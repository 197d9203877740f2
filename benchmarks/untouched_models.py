"""The models of the proof that a trace never touches a model: each has much that a trace could leave changed."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt
from typing import Any

import timm
import torch
import torchvision
from torch import Tensor, nn

_SCALES = {"first": [1.0, 2.0], "calls": 0}  # a table that forward reads


@functools.lru_cache
def _table(length: int) -> Tensor:
    return torch.linspace(0.5, 1.5, length)


class Block(nn.Module):
    """Writes a buffer, statistics, an attribute and a nested dict, draws, and switches gradients off."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.dropout = nn.Dropout(0.2)
        self.config = {"sizes": [1, 2, {"width": 8}]}
        self.size: Any = None
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        """Return 8 channels."""
        self.calls += 1
        self.size = x.shape
        self.config["sizes"][2]["width"] = 8
        with torch.no_grad():
            shift = x.mean() * 0.1
        return torch.relu(self.dropout(self.norm(self.conv(x)))) + shift


class Net(nn.Module):
    """Two blocks. With `needs_values` it asks for a sum, so that it is traced for real, and pools larger images."""

    def __init__(self, needs_values: bool = False) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(3), Block(8))
        self.head = nn.Linear(8, 4)
        self.needs_values = needs_values

    def forward(self, x: Tensor) -> Tensor:
        """Return 4 numbers for each image."""
        if self.needs_values and x.shape[-1] > 16:
            x = nn.functional.avg_pool2d(x, 2)
        x = self.blocks(x)
        if self.needs_values and x.sum() > -1e9:
            x = x[..., : int(x.shape[-1] / 2)]
        return self.head(x.mean((2, 3)))


class Hooked(nn.Module):
    """Has hooks, and calls functions of its Python file over which a trace lays others: sqrt, and a cached one."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block(3)
        self.head = nn.Linear(8, 4)
        self.seen: list[str] = ["nothing"]
        self.block.norm.register_forward_hook(_double)
        self.block.register_forward_pre_hook(_clamp)
        self.head.register_forward_hook(_with_scale, with_kwargs=True)

    def forward(self, x: Tensor) -> Tensor:
        """Return 4 numbers for each image."""
        x = self.block(x) / sqrt(x.shape[-1]) * math.sqrt(2.0)
        x = x.mean((2, 3)) * _table(8) * len(self.seen)
        return self.head(x)


def _double(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return output * 2


def _clamp(module: nn.Module, inputs: Any) -> tuple[Tensor]:
    return (inputs[0].clamp(-3, 3),)


def _with_scale(module: nn.Module, inputs: Any, kwargs: Any, output: Tensor) -> Tensor:
    return output * _SCALES["first"][1]


@dataclass(frozen=True)
class Case:
    """A model: how it is built, what it is asked for, and inputs.

    Attributes:
        wanted: features of it: the paths of modules that run once.
        side: height and width of the images that it is traced on.
        other_side: those of images that an adaptive extractor is called with.
        is_symbolic: whether a symbolic trace can follow it.
        written: attributes of its modules that every call assigns anew.
    """

    name: str
    construct: Callable[[], nn.Module]
    wanted: tuple[str, ...]
    side: int
    other_side: int
    is_symbolic: bool = True
    written: frozenset[str] = frozenset()

    def build(self) -> nn.Module:
        """Return the model in train mode, with weights from a fixed seed, and its last module in eval mode."""
        torch.manual_seed(0)
        model = self.construct().train()
        list(model.modules())[-1].eval()
        return model

    def images(self, side: int | None = None) -> Tensor:
        """Return two images, the same each time."""
        side = side or self.side
        return torch.rand(2, 3, side, side, generator=torch.Generator().manual_seed(side))


_BLOCK = frozenset({"size"})
CASES = {
    case.name: case
    for case in (
        Case("small", Net, ("blocks.0.norm", "blocks.1"), 12, 24, written=_BLOCK),
        Case("values", lambda: Net(True), ("blocks.0.norm", "blocks.1"), 12, 24, is_symbolic=False, written=_BLOCK),
        Case("hooks", Hooked, ("block.norm", "block"), 12, 24, written=_BLOCK),
        Case(
            "resnet18",
            lambda: torchvision.models.resnet18(weights=None),
            ("layer1.0.bn1", "layer2.1"),
            32,
            48,
        ),
        Case(
            "vit",
            lambda: timm.create_model("test_vit", pretrained=False, img_size=32),
            ("blocks.0.attn.qkv", "blocks.1"),
            32,
            32,
        ),
        Case(
            "efficientnet",
            lambda: timm.create_model("test_efficientnet", pretrained=False),
            ("blocks.1.0.bn1", "blocks.2.0"),
            32,
            48,
        ),
    )
}
