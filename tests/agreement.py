"""What tests of traces share: inputs, and the comparison of a graph with the model, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import featx


def image(batch: int = 2, width: int = 4, seed: int = 0) -> torch.Tensor:
    return torch.randn(batch, width, generator=torch.Generator().manual_seed(seed))


def same(one: Any, other: Any) -> bool:
    """Compare two outputs bit for bit, at any depth."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (tuple, list)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return bool(one == other) and type(one) is type(other)


def run(module: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    torch.manual_seed(0)
    copies = [value.clone() if isinstance(value, torch.Tensor) else value for value in args]
    return module(*copies, **kwargs)


def agree(model: nn.Module, example: tuple[Any, ...], *others: tuple[Any, ...]) -> featx.GraphModule:
    """Trace on `example`, compare with the model there and on others, and return what was traced."""
    traced = featx.trace(model, *example)
    for args in (example, *others):
        assert same(run(traced, *args), run(model, *args))
    return traced
