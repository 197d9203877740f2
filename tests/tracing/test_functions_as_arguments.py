"""Functions that forward makes and passes on to a module: what they hold of the example must not stay in the graph."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

import featx

X = torch.rand(3, 4, generator=torch.Generator().manual_seed(0))


class Applying(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, function: Any) -> torch.Tensor:
        return function(self.linear(x))


class Scaling:
    def __init__(self, factor: torch.Tensor) -> None:
        self.factor = factor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor

    def applied(self, x: torch.Tensor) -> torch.Tensor:
        return x - self.factor


@featx.wrap
def applied(function: Any, x: torch.Tensor) -> torch.Tensor:
    return function(x)


class Passing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part, self.weight = Applying(), nn.Parameter(torch.ones(4) * 2)
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(x, self.function(x))

    def function(self, x: torch.Tensor) -> Any:
        return lambda value: value + x


class OfAMask(Passing):
    def function(self, x: torch.Tensor) -> Any:
        mask = (x > 0.5).float()
        return lambda value: value * mask


class OfASize(Passing):
    def function(self, x: torch.Tensor) -> Any:
        rows = x.shape[0]
        return lambda value: value * rows


class OfAParameter(Passing):
    def function(self, x: torch.Tensor) -> Any:
        return lambda value: value * self.weight


class OfASubmodule(Passing):
    def function(self, x: torch.Tensor) -> Any:
        return lambda value: self.inner(value)


class WithADefault(Passing):
    def function(self, x: torch.Tensor) -> Any:
        return lambda value, x=x: value - x


class InAnObject(Passing):
    def function(self, x: torch.Tensor) -> Any:
        return Scaling(x)


class AMethod(Passing):
    def function(self, x: torch.Tensor) -> Any:
        return Scaling(x).applied


class APartial(Passing):
    def function(self, x: torch.Tensor) -> Any:
        return functools.partial(torch.mul, other=x)


class Wrapped(Passing):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return applied(lambda value: value * x, self.inner(x))


KINDS = [Passing, OfAMask, OfASize, OfAParameter, OfASubmodule, WithADefault, InAnObject, AMethod, APartial]


@pytest.mark.parametrize("names", [["output"], ["part"], ["part.linear", "output"]], ids=" ".join)
@pytest.mark.parametrize("kind", KINDS)
def test_module_that_gets_it_is_looked_into(kind: type[Passing], names: list[str]) -> None:
    model = kind().eval()
    extractor = featx.create_feature_extractor(model, names, example_inputs=X)
    for x in (X, 1 - X, torch.rand(5, 4)):
        assert torch.equal(extractor(x)[names[-1]], model(x))


def test_function_that_is_one_node_does_not_get_it() -> None:
    with pytest.raises(featx.TraceError, match="a function that holds values of forward is passed"):
        featx.trace(Wrapped(), X)


class CheckpointFunction(torch.autograd.Function):
    """Gradient checkpointing as diffusion models have it."""

    @staticmethod
    def forward(ctx: Any, function: Any, *args: torch.Tensor) -> Any:
        ctx.function, ctx.args = function, args
        return function(*args)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        args = [each.detach().requires_grad_() for each in ctx.args]
        with torch.enable_grad():
            result = ctx.function(*args)
        return None, *torch.autograd.grad(result, args, *gradients)


class Checkpointed(nn.Module):
    def __init__(self, use_checkpoint: bool) -> None:
        super().__init__()
        self.layers, self.use_checkpoint = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), use_checkpoint

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) + x

    def forward(self, x: torch.Tensor) -> Any:
        return CheckpointFunction.apply(self.inner, x) if self.use_checkpoint else self.inner(x)


def test_what_a_checkpoint_by_an_autograd_function_runs_is_refused_with_advice() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Checkpointed(True)).eval()
    whole = featx.create_feature_extractor(model, ["1"], example_inputs=X)
    assert torch.equal(whole(X)["1"], model(X))
    with pytest.raises(featx.TraceError, match="switch it off in the model"):
        featx.create_feature_extractor(model, ["1.layers"], example_inputs=X)
    model[1].use_checkpoint = False
    inner = featx.create_feature_extractor(model, ["1.layers"], example_inputs=X)
    assert torch.equal(inner(X)["1.layers"], model[1].layers(model[0](X)))


def test_function_without_such_values_may_be_passed() -> None:
    class Plain(Passing):
        def function(self, x: torch.Tensor) -> Any:
            return torch.relu

    model = Plain().eval()
    extractor = featx.create_feature_extractor(model, ["part"], example_inputs=X)
    assert [node.target for node in extractor.graph.nodes if node.op == "call_module"] == ["part"]
    assert torch.equal(extractor(X)["part"], model(X))
