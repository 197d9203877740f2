"""Tracer: gradient, autocast and inference modes that forward switches are part of what it does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import featx

X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))


class PartlyFrozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.trained = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = self.frozen(x)
        return self.trained(y)


@pytest.mark.parametrize("traced_with", [True, False])
@pytest.mark.parametrize("run_with", [True, False])
def test_gradient_mode_of_the_caller_holds_outside_the_region(traced_with: bool, run_with: bool) -> None:
    model = PartlyFrozen()
    with torch.set_grad_enabled(traced_with):
        traced = featx.symbolic_trace(model)
    with torch.set_grad_enabled(run_with):
        assert traced(X).requires_grad is run_with
        assert torch.is_grad_enabled() is run_with
    assert torch.is_grad_enabled()


def test_gradient_mode_is_as_before_when_the_graph_raises() -> None:
    traced = featx.symbolic_trace(PartlyFrozen())
    with pytest.raises(RuntimeError):
        traced(torch.ones(2, 7))
    assert torch.is_grad_enabled()


def test_gradient_mode_is_as_before_when_the_region_is_cut_in_two() -> None:
    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                return self.second(self.first(x))

    extractor = featx.create_feature_extractor(Inside(), ["first"])
    assert not extractor(X)["first"].requires_grad
    assert torch.is_grad_enabled()


@pytest.mark.parametrize(
    "context",
    [lambda: torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode],
    ids=["autocast", "inference_mode"],
)
def test_autocast_inside_forward_is_recorded_or_refused(context: Callable[[], Any]) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with context():
                return self.linear(x)

    model = Model()
    try:
        traced = featx.symbolic_trace(model)
    except featx.TraceError:
        return
    result, expected = traced(X), model(X)
    assert result.dtype is expected.dtype
    assert result.requires_grad is expected.requires_grad


class Switching(nn.Module):
    def __init__(self, switch: Callable[[Any], object]) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.switch = switch

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.norm(x)
        self.switch(self)
        second = self.norm(first)
        self.norm.train()
        return second


@pytest.mark.parametrize("switch", [lambda model: model.norm.eval(), lambda model: model.eval()])
def test_forward_that_switches_modes_is_refused_and_the_modes_are_as_before(switch: Callable[[Any], object]) -> None:
    model = Switching(switch).train()
    with pytest.raises(featx.TraceError, match=r"puts '.*' into eval mode"):
        featx.symbolic_trace(model)
    assert model.training
    assert model.norm.training


def enabled_around_nothing(model: PartlyFrozen, x: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        pass
    return model.trained(x)


def enabled_inside_a_region_without(model: PartlyFrozen, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad(), torch.enable_grad():
        return model.trained(x)


def set_and_left(model: PartlyFrozen, x: torch.Tensor) -> torch.Tensor:
    with torch.set_grad_enabled(False):
        x = model.frozen(x)
    return model.trained(x)


@pytest.mark.parametrize("follow", [featx.symbolic_trace, lambda model: featx.trace(model, X)])
@pytest.mark.parametrize("run_with", [True, False])
@pytest.mark.parametrize("compute", [enabled_around_nothing, enabled_inside_a_region_without, set_and_left])
def test_gradients_are_on_and_off_where_the_model_has_them(
    compute: Callable[[Any, torch.Tensor], torch.Tensor], run_with: bool, follow: Callable[[Any], Any]
) -> None:
    class Model(PartlyFrozen):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return compute(self, x)

    model = Model()
    traced = follow(model)
    with torch.set_grad_enabled(run_with):
        assert traced(X).requires_grad is model(X).requires_grad
        assert torch.is_grad_enabled() is run_with
