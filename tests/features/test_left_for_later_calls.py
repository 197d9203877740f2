"""Modules whose first call leaves what their second call reads, as RevIN in forecasters; against the eager model."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import featx


class InAttributes(nn.Module):
    """Keeps statistics in attributes, one call long."""

    def forward(self, x: torch.Tensor, mode: str) -> torch.Tensor:
        if mode == "norm":
            self.mean, self.scale = x.mean(1, keepdim=True).detach(), x.std(1, keepdim=True).detach() + 1e-5
            return (x - self.mean) / self.scale
        return x * self.scale + self.mean


class InBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: torch.Tensor, mode: str) -> torch.Tensor:
        if mode == "norm":
            self.scale.copy_(x.std())
            return x / self.scale
        return x * self.scale


class InDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, torch.Tensor] = {}

    def forward(self, x: torch.Tensor, mode: str) -> torch.Tensor:
        if mode == "norm":
            self.kept["scale"] = x.abs().amax()
            return x / self.kept["scale"]
        return x * self.kept["scale"]


class Inside(nn.Module):
    """Keeps them in a module inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = InAttributes()

    def forward(self, x: torch.Tensor, mode: str) -> torch.Tensor:
        return self.inner(x, mode) + 1


class Forecaster(nn.Module):
    """Goes on with what the first call returned, or with its input: then only what the call left is used."""

    def __init__(self, kind: type[nn.Module], goes_on: bool) -> None:
        super().__init__()
        self.norm, self.body, self.last, self.goes_on = kind(), nn.Linear(8, 8), nn.Linear(8, 8), goes_on

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x, "norm")
        return self.last(self.norm(self.body(normed if self.goes_on else x), "denorm"))


KINDS = [InAttributes, InBuffer, InDict, Inside]


def inputs(seed: int) -> torch.Tensor:
    return torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(seed)) * (seed + 1)


@pytest.mark.parametrize("names", [["output"], ["body", "last"], ["norm"], ["last"]], ids=" ".join)
@pytest.mark.parametrize("has_run", [False, True])
@pytest.mark.parametrize("goes_on", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_first_call_is_kept(kind: type[nn.Module], goes_on: bool, has_run: bool, names: list[str]) -> None:
    torch.manual_seed(0)
    model = Forecaster(kind, goes_on).eval()
    if has_run:
        model(inputs(5))
    eager, found = copy.deepcopy(model), dict[str, torch.Tensor]()
    for path, module in eager.named_children():
        module.register_forward_hook(lambda _, __, result, path=path: found.__setitem__(path, result))
    extractor = featx.create_feature_extractor(model, names, example_inputs=inputs(0))
    for seed in (1, 2):
        found["output"] = eager(inputs(seed))
        for name, value in extractor(inputs(seed)).items():
            assert torch.equal(value, found[name])


@pytest.mark.parametrize("has_run", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_start_behind_it_needs_the_input_that_it_reads(kind: type[nn.Module], has_run: bool) -> None:
    torch.manual_seed(0)
    model = Forecaster(kind, goes_on=True).eval()
    if has_run:
        model(inputs(5))
    with pytest.raises(featx.RequestError, match=r"'norm.*' lies before the inputs and changes .* have 'x' too"):
        featx.create_feature_extractor(model, ["output"], inputs=["body"], example_inputs=inputs(0))
    extractor = featx.create_feature_extractor(model, ["output"], inputs=["body", "x"], example_inputs=inputs(0))
    x, other = inputs(1), inputs(2)
    expected = copy.deepcopy(model)
    expected.body.register_forward_hook(lambda *_: other)
    assert torch.equal(extractor(other, x)["output"], expected(x))


@pytest.mark.parametrize("kind", KINDS)
def test_dead_code_removal_keeps_it(kind: type[nn.Module]) -> None:
    model = Forecaster(kind, goes_on=False).eval()
    extractor = featx.create_feature_extractor(copy.deepcopy(model), ["output"], example_inputs=inputs(0))
    extractor.graph.eliminate_dead_code()
    extractor.recompile()
    assert torch.equal(extractor(inputs(1))["output"], model(inputs(1)))
