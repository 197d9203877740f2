"""Small models that several test files trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class Scaled(nn.Module):
    """A layer between two reads of one parameter, with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("offset", torch.zeros(4))
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x * self.weight + self.offset) * self.weight


class Residual(nn.Module):
    """A residual block, a loop over modules, and a dict of heads as the output."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), Scaled())
        self.blocks = nn.ModuleList([Scaled(), Scaled()])
        self.heads = nn.ModuleDict({"a": nn.Linear(4, 2), "b": nn.Linear(4, 3)})

    def forward(self, x: torch.Tensor) -> Any:
        x = x + self.block(x)
        for block in self.blocks:
            x = block(x)
        return {name: head(x) for name, head in self.heads.items()}


class Computing(nn.Module):
    """Computes what it is told to, with a layer that has weights."""

    def __init__(self, compute: Callable[[Any, torch.Tensor], Any], inner: nn.Module | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.inner = inner
        self.compute = compute

    def forward(self, x: torch.Tensor) -> Any:
        return self.compute(self, x)


class BehindALayer(nn.Module):
    """Computes something of what a layer returns."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.function = nn.Linear(3, 3), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.first(x))
