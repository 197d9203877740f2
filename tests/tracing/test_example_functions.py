"""Functions that are more than a torch call: scripted, with a gradient of their own, checkpointed, mapped."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from agreement import agree, image, same
from torch import nn
from torch.utils.checkpoint import checkpoint

import featx


def branching(x: torch.Tensor) -> torch.Tensor:
    if x.size(0) > 2:
        return x * 2
    return x + 1


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # scripting is going away; models with scripted functions are still about
    scripted = torch.jit.script(branching)


class CallsScripted(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return scripted(x) - 1


def test_scripted_function_is_one_node_and_keeps_its_own_control_flow() -> None:
    agree(CallsScripted(), (image(3),), (image(2),), (image(5),))


class Tripled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 3


class UsesOwnGradient(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Tripled.apply(x) + 1


def test_gradient_of_an_autograd_function_is_kept() -> None:
    traced = agree(UsesOwnGradient(), (image(),), (image(5),))
    x = image().requires_grad_()
    traced(x).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((2, 4), 3.0))


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.linear, x, use_reentrant=False) + 1


def test_checkpointed_module_gives_its_value_and_gradient() -> None:
    model = Checkpointed()
    traced = agree(model, (image(),), (image(5),))
    traced(image()).sum().backward()
    gradient = model.linear.weight.grad
    assert gradient is not None
    model.zero_grad()
    model(image()).sum().backward()
    assert torch.equal(gradient, model.linear.weight.grad)


class Mapped(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.vmap(lambda row: row * row.sum())(x)


class HasMapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.mapped = Mapped()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mapped(self.linear(x)) + 1


def test_submodule_that_cannot_be_followed_is_kept_whole() -> None:
    model = HasMapped()
    traced = agree(model, (image(),), (image(5),))
    assert [node.target for node in traced.graph.nodes if node.op == "call_module"] == ["linear", "mapped"]
    assert isinstance(traced.mapped, Mapped)
    extractor = featx.create_feature_extractor(model, ["mapped", "add"], example_inputs=image())
    assert same(extractor(image()), {"mapped": model.mapped(model.linear(image())), "add": model(image())})
