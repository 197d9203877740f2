"""What tests of traces share: inputs, and the comparison of a graph with the model, bit for bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import featx


def image(batch: int = 2, width: int = 4, seed: int = 0) -> torch.Tensor:
    return torch.randn(batch, width, generator=torch.Generator().manual_seed(seed))


def same(one: Any, other: Any) -> bool:
    """Compare two outputs bit for bit, at any depth, with the types of what holds them."""
    if isinstance(one, torch.Tensor):
        if not isinstance(other, torch.Tensor) or (one.dtype, one.layout) != (other.dtype, other.layout):
            return False
        return same(one.unbind(), other.unbind()) if one.is_nested else torch.equal(one, other)
    if type(one) is not type(other):
        return False
    if dataclasses.is_dataclass(one):
        return all(same(getattr(one, field.name), getattr(other, field.name)) for field in dataclasses.fields(one))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


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


def gradients(module: Callable[..., Any], model: nn.Module, x: torch.Tensor) -> list[torch.Tensor | None]:
    """Return the gradients of the sum of what `module` returns: of the input and of the weights of `model`."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    torch.manual_seed(0)
    module(x).square().sum().backward()
    return [x.grad, *(None if weight.grad is None else weight.grad.clone() for weight in model.parameters())]


def agree_with_gradients(model: nn.Module) -> featx.GraphModule:
    """Compare values and gradients with the model at two sizes, and return what was traced."""
    traced = agree(model, (image(),), (image(5),))
    for x in (image(), image(5)):
        assert same(gradients(traced, model, x), gradients(model, model, x))
    return traced
