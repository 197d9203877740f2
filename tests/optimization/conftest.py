"""A small network with what recipes change, and its extractor."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import featx
from featx.features.dual import DualGraphModule


class Small(nn.Module):
    """Convolutions with batch norm, a residual connection with a layer scale, and linear layers of one input."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.Identity())
        self.block = nn.Conv2d(16, 16, 3, padding=1)
        self.gamma = nn.Parameter(torch.full((16, 1, 1), 0.5))
        self.dropout = nn.Dropout(0.2)
        self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        x = x + self.dropout(self.block(x) * self.gamma)
        tokens = x.flatten(2).transpose(1, 2)
        scores = self.query(tokens) @ self.key(tokens).transpose(1, 2)
        return scores.softmax(-1) @ self.value(tokens)


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    model = Small()
    norm = model.stem[1]
    assert isinstance(norm, nn.BatchNorm2d)
    for tensor in (norm.running_mean, norm.running_var, norm.weight.data):
        assert tensor is not None
        nn.init.uniform_(tensor, 0.5, 2.0)
    return model.eval()


@pytest.fixture
def images() -> torch.Tensor:
    return torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def extractor(model: nn.Module, images: torch.Tensor) -> DualGraphModule:
    nodes = {"stem": "map", "value": "values", "output": "output"}
    found = featx.create_feature_extractor(model, nodes, example_inputs=images)
    assert isinstance(found, DualGraphModule)
    return found
