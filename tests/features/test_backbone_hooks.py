"""create_backbone chooses the same maps of a model whether or not hooks look at its values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchvision
from torch import nn

import featx

OBSERVERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "stores": lambda value: value,
    "clones": lambda value: value.clone(),
    "detaches": lambda value: value.detach().cpu(),
    "shape": lambda value: value.shape,
    "averages": lambda value: value.mean(1, keepdim=True),
}


class Decoder(nn.Module):
    """Returns a map of a small stride, made of one of a large stride and one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1)), nn.Sequential(nn.Conv2d(8, 16, 3, 2, 1))
        self.up = nn.Upsample(scale_factor=2)
        self.last = nn.Sequential(nn.Conv2d(24, 8, 3, padding=1), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.first(x)
        return self.last(torch.cat([self.up(self.second(first)), first], 1))


def observe(module: nn.Module, look: Callable[[torch.Tensor], Any]) -> None:
    """Store what `look` makes of the result of a module, which no one removes again."""
    seen: list[Any] = []
    module.register_forward_hook(lambda module, args, result: seen.append(look(result)))


@pytest.mark.parametrize("path", ["last", "last.1", "second", "first.0", ""])
@pytest.mark.parametrize("observer", OBSERVERS)
def test_a_hook_that_looks_at_a_value_changes_no_stage(observer: str, path: str) -> None:
    model = Decoder().eval()
    observe(model.get_submodule(path), OBSERVERS[observer])
    backbone = featx.create_backbone(model, strides=(2, 4))
    assert [(info.node, info.channels) for info in backbone.feature_info] == [("last", 8), ("second", 16)]
    x = torch.rand(1, 3, 64, 64)
    assert torch.equal(backbone(x)["0"], model(x))


@pytest.mark.slow
def test_hooks_on_the_layers_of_a_resnet_change_no_stage() -> None:
    model = torchvision.models.resnet18(weights=None).eval()
    for name in ("layer1", "layer2", "layer3", "layer4"):
        observe(model.get_submodule(name), OBSERVERS["detaches"])
    infos = featx.create_backbone(model).feature_info
    assert [(info.node, info.stride) for info in infos] == [
        ("relu", 2), ("layer1", 4), ("layer2", 8), ("layer3", 16), ("layer4", 32)
    ]  # fmt: skip
