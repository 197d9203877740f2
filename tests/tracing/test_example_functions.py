"""Calls that torch does not show to Python: scripted, with a gradient of their own, operators of a library."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from agreement import agree, agree_with_gradients, image, same
from small_models import Computing
from torch import nn

import featx

Compute = Callable[[Any, torch.Tensor], Any]


# -- scripted ----------------------------------------------------------------------------------------------------------


def branching(x: torch.Tensor) -> torch.Tensor:
    if x.size(0) > 2:
        return x * 2
    return x + 1


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.size(0) > 2:
            x = x * 2
        return self.linear(x)


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # scripting is going away; models with scripted parts are still about
    scripted = torch.jit.script(branching)
    scripted_module = torch.jit.script(Branching())
    traced_module = torch.jit.trace(nn.Linear(4, 4), image())


def test_scripted_function_is_one_node_and_keeps_its_own_control_flow() -> None:
    traced = agree_with_gradients(Computing(lambda model, x: scripted(model.linear(x)) - 1))
    calls = [node for node in traced.graph.nodes if node.op == "call_function" and not node.meta.get("is_guard")]
    assert [node.name for node in calls] == ["branching", "sub"]


@pytest.mark.slow
@pytest.mark.parametrize("inner", [scripted_module, traced_module], ids=["scripted", "traced"])
def test_module_of_torchscript_is_one_node_and_keeps_its_own_control_flow(inner: nn.Module) -> None:
    model = Computing(lambda model, x: model.inner(model.linear(x)) - 1, inner)
    traced = agree_with_gradients(model)
    assert [node.target for node in traced.graph.nodes if node.op == "call_module"] == ["linear", "inner"]
    assert traced.inner is inner
    extractor = featx.create_feature_extractor(model, ["inner"], example_inputs=image())
    assert same(extractor(image(5))["inner"], inner(model.linear(image(5))))


# -- gradients of their own --------------------------------------------------------------------------------------------


class Tripled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 3


tripled = Tripled.apply  # as the documentation of PyTorch does


class ProductAndSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: int) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.factor = factor
        return x * factor, x + factor

    @staticmethod
    def backward(ctx: Any, first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, None]:
        return first * ctx.factor * 7 + second, None


class DoubledInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 5


def product_of_two_results(model: Any, x: torch.Tensor) -> torch.Tensor:
    first, second = ProductAndSum.apply(model.linear(x), x.shape[0])
    return first * second


def written_by_a_function(model: Any, x: torch.Tensor) -> torch.Tensor:
    y = model.linear(x)
    DoubledInPlace.apply(y)
    return y + 1


OWN_GRADIENTS: dict[str, Compute] = {
    "one": lambda model, x: Tripled.apply(model.linear(x)) + 1,
    "of the input": lambda model, x: Tripled.apply(x) + 1,
    "by a name for apply": lambda model, x: tripled(model.linear(x)) + 1,
    "two results": product_of_two_results,
    "in place": written_by_a_function,
}


@pytest.mark.parametrize("name", OWN_GRADIENTS)
def test_gradient_of_an_autograd_function_is_kept(name: str) -> None:
    traced = agree_with_gradients(Computing(OWN_GRADIENTS[name]))
    if name == "of the input":
        x = image().requires_grad_()
        traced(x).sum().backward()
        assert x.grad is not None
        assert torch.equal(x.grad, torch.full((2, 4), 3.0))


# -- operators ---------------------------------------------------------------------------------------------------------


@torch.library.custom_op("featx_tests::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@twice.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("featx_tests::nonzero_rows", mutates_args=())
def nonzero_rows(x: torch.Tensor) -> torch.Tensor:  # of which only real values tell the shape
    return x[x[:, 0] > 0]


@torch.library.custom_op("featx_tests::add_one", mutates_args=("x",))
def add_one(x: torch.Tensor) -> None:
    x.add_(1)


def written_by_an_operator(model: Any, x: torch.Tensor) -> torch.Tensor:
    y = model.linear(x).detach()
    torch.ops.featx_tests.add_one(y)
    return y * 2


OPERATORS: dict[str, Compute] = {
    "overload": lambda model, x: torch.ops.aten.add.Tensor(model.linear(x), x),
    "packet": lambda model, x: torch.ops.aten.relu(model.linear(x)),
    "several results": lambda model, x: torch.ops.aten.native_layer_norm(x, [4], None, None, 1e-5)[0] + 1,
    "pieces": lambda model, x: torch.ops.aten.split(x, 2, 1)[1] * 2,
    "of Python": lambda model, x: torch.ops.featx_tests.twice(x) + 1,
    "of Python by its name": lambda model, x: twice(x) + 1,
    "without a rule for its form": lambda model, x: nonzero_rows(x) + 1,
    "that writes": written_by_an_operator,
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operator_computes_the_same_in_the_graph(name: str) -> None:
    agree(Computing(OPERATORS[name]), (image(),), (image(5),), (image(2, seed=3),))
