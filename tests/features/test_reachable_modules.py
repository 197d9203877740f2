"""Modules that code of an extractor's parts reaches, and that are registered elsewhere in the model."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import featx

X = torch.rand(4, 6)


class Model(nn.Module):
    def __init__(self, hold: Callable[[Any, Any], None]) -> None:
        super().__init__()
        self.shared = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5))
        self.decoder = nn.Module()
        self.unused = nn.Linear(6, 6)
        self.head = nn.Linear(6, 6)
        hold(self, self.shared)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.decoder(x))


class ByList(nn.Module):
    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)
        self.shared = [shared]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.shared[0](self.fc(x))


class ByParent(nn.Module):
    def __init__(self, parent: Model) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)
        object.__setattr__(self, "parent", parent)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.parent.shared(self.fc(x))


class ByReference(ByParent):
    def __init__(self, parent: Model) -> None:
        super().__init__(parent)
        object.__setattr__(self, "parent", weakref.proxy(parent))


def by_list(model: Any, shared: nn.Module) -> None:
    model.decoder = ByList(shared)


def by_parent(model: Any, shared: nn.Module) -> None:
    model.decoder = ByParent(model)


def by_reference(model: Any, shared: nn.Module) -> None:
    model.decoder = ByReference(model)


def loaded(module: nn.Module, state: dict[str, torch.Tensor]) -> nn.Module:
    module.load_state_dict({name: value for name, value in state.items() if name in module.state_dict()})
    return module


@pytest.mark.parametrize("hold", [by_list, by_parent, by_reference])
def test_state_and_modes_of_the_extractor_reach_them(hold: Callable[[Any, Any], None]) -> None:
    model = Model(hold).eval()
    state = {name: value * 2 for name, value in model.state_dict().items()}
    changes: list[Callable[[nn.Module], nn.Module]] = [
        lambda m: m.train(), lambda m: m.eval(), lambda m: m.half().float(), lambda m: loaded(m, state),
    ]  # fmt: skip
    extractor = featx.create_feature_extractor(model, ["output"], example_inputs=X)
    assert {name for name in model.state_dict() if name.startswith("shared")} <= set(extractor.state_dict())
    for change in changes:
        one, other = copy.deepcopy(model) if hold is not by_reference else model, extractor
        if hold is not by_reference:  # a copy of a weak reference leads to the original
            other = copy.deepcopy(other)
        change(other)
        change(one)
        torch.manual_seed(0)
        expected = one(X)
        torch.manual_seed(0)
        assert torch.equal(other(X)["output"], expected)


def test_what_is_not_reached_is_left_out() -> None:
    model = Model(by_list).eval()
    assert "unused.weight" not in featx.create_feature_extractor(model, ["output"], example_inputs=X).state_dict()
