"""Generated code of whole models, to be read in review."""

# pyright: reportMissingParameterType=false
# Annotations would be a part of the generated code that is compared here.
from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from featx import symbolic_trace


class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.relu(self.norm(self.conv(x)) + x)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 1)
        self.stages = nn.ModuleDict({"one": nn.Sequential(Block(4), Block(4)), "two": nn.Sequential(Block(4))})
        self.head = nn.Linear(4, 2)

    def forward(self, image: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.stages["two"](self.stages["one"](self.stem(image)))
        return {"features": x, "logits": self.head(x.mean((2, 3)))}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x, mask=None, *, heads: int = 2):
        batch, tokens, width = x.shape
        query, key, value = self.qkv(x).reshape(batch, tokens, 3, 2, width // 2).permute(2, 0, 3, 1, 4).unbind(0)
        weights = (query @ key.transpose(-2, -1) * self.scale).softmax(-1)
        return functional.dropout(weights @ value, 0.1, self.training).transpose(1, 2).reshape(batch, tokens, -1)


class Writes(nn.Module):
    def forward(self, x, y):
        x[:, 0] = 1
        x += y
        y.clamp_(min=-float("inf"))
        return torch.cat([x, y.to(torch.float64, memory_format=torch.contiguous_format)], dim=-1), torch.zeros(
            x.shape[0]
        )


@pytest.mark.parametrize("model", [Residual(), Attention(), Writes()], ids=lambda model: type(model).__name__)
def test_code_of_a_model_is_the_golden(model: nn.Module, golden: Callable[[str, str], None]) -> None:
    golden(f"emit_{type(model).__name__.lower()}", symbolic_trace(model).code.strip() + "\n")
