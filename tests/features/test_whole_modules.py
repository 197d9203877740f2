"""A module that no wanted value lies inside stays the model's own: its class, hooks, mode and control flow."""

from __future__ import annotations

import pytest
import torch
from agreement import image, same
from torch import nn

import featx


def test_hook_does_not_run_in_the_trace_and_runs_in_the_extractor() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    calls: list[int] = []
    model[0].register_forward_hook(lambda module, args, output: calls.append(1) or output * 2)
    extractor = featx.create_feature_extractor(model, ["0", "1"], example_inputs=image())
    assert calls == []
    result = extractor(image())
    assert calls == [1]
    assert same(result["1"], model(image()))


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        return x * 2 if x.shape[0] > 3 and float(x.detach().sum()) > -1e9 else x + 1


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Inner()
        self.blocks = nn.Sequential(Inner(), Inner())
        self.last = Inner()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.blocks(torch.relu(self.first(x))))


def test_module_that_nothing_is_asked_of_is_the_models_own_and_stays_alive() -> None:
    model = Outer()
    extractor = featx.create_feature_extractor(model, ["blocks", "relu"], example_inputs=image())
    assert extractor.blocks is model.blocks
    assert extractor.first is model.first
    assert not hasattr(extractor, "last")
    calls: list[int] = []
    model.blocks[1].register_forward_hook(lambda *_: calls.append(1))
    for batch in (2, 5):
        x = image(batch)
        hidden = torch.relu(model.first(x))
        expected = {"blocks": model.blocks(hidden), "relu": hidden}
        calls.clear()
        assert same(extractor(x), expected)
        assert calls == [1]


def test_extractor_keeps_the_residual_layer_of_a_resnet_whole() -> None:
    torchvision = pytest.importorskip("torchvision")
    model = torchvision.models.resnet18().eval()
    extractor = featx.create_feature_extractor(model, ["layer4"], example_inputs=torch.rand(2, 3, 32, 32))
    assert extractor.layer4 is model.layer4
    found: list[torch.Tensor] = []
    model.layer4.register_forward_hook(lambda module, args, output: found.append(output))
    x = torch.rand(2, 3, 64, 64)
    model(x)
    assert torch.equal(extractor(x)["layer4"], found[0])
