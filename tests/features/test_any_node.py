"""A feature may be any node: a tensor, a tuple, a size, a value inside a default leaf."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from agreement import image, same
from torch import nn

import featx


def test_value_inside_a_default_leaf_can_be_asked_for() -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    model = nn.Sequential(nn.Linear(4, 4), layer)
    x = torch.randn(2, 3, 4)
    extractor = featx.create_feature_extractor(model.eval(), ["1.linear1"], example_inputs=x)
    found: list[torch.Tensor] = []
    layer.linear1.register_forward_hook(lambda module, args, output: found.append(output))
    model(x)
    assert torch.equal(extractor(x)["1.linear1"], found[0])


class Splitting(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x[:, :2], x[:, 2:]


class UsesSplit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.split = Splitting()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = self.split(x * 2)
        return left + right


def test_tuple_can_be_a_feature() -> None:
    extractor = featx.create_feature_extractor(UsesSplit(), ["split"], example_inputs=image())
    assert same(extractor(image(3))["split"], (image(3)[:, :2] * 2, image(3)[:, 2:] * 2))


class BadTail(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.linear(x)
        y = torch.relu(x)
        return y.detach().numpy().tolist()


def test_tail_that_cannot_be_traced_does_no_harm() -> None:
    model = BadTail()
    with pytest.raises(featx.TraceError):
        featx.trace(model, image())
    extractor = featx.create_feature_extractor(model, ["relu"], example_inputs=image())
    assert torch.equal(extractor(image(5))["relu"], torch.relu(model.linear(image(5))))
