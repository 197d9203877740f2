"""create_feature_extractor: torch.compile and torch.export accept what it returns (point 9)."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

import featx

X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Compilable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)
        self.bn = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.scale = nn.Parameter(torch.full((1,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, channels = x.shape[:2]
        x = self.relu(self.bn(self.conv(x))) * self.scale
        x += 1
        return x.reshape(batch, -1).softmax(dim=-1) / math.sqrt(channels)


NAMES = ["bn", "relu", "add", "softmax", "truediv"]


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_9_torch_compile_takes_the_whole_graph(training: bool) -> None:
    extractor = featx.create_feature_extractor(Compilable().train(training), NAMES)
    expected = copy.deepcopy(extractor)(X)
    torch.compiler.reset()
    result = torch.compile(extractor, fullgraph=True, backend="eager")(X)
    assert list(result) == NAMES
    assert all(torch.equal(result[name], expected[name]) for name in NAMES)


def test_9_torch_export_takes_it() -> None:
    extractor = featx.create_feature_extractor(Compilable().eval(), NAMES)
    expected = extractor(X)
    program = torch.export.export(extractor, (X,))
    result = program.module()(X)
    assert list(result) == NAMES
    assert all(torch.equal(result[name], expected[name]) for name in NAMES)
