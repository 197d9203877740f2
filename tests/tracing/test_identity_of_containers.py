"""`nn.Identity`, as a stage that is switched off, returns the very list, dict or tensor that it is given."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import featx

X = torch.rand(2, 4, generator=torch.Generator().manual_seed(0))


def replace_first(stage: nn.Module, values: list[torch.Tensor]) -> torch.Tensor:
    same = stage(values)
    values[0] = values[0] * 2
    return same[0] - same[1]


def drop_last(stage: nn.Module, values: list[torch.Tensor]) -> torch.Tensor:
    same = stage(values)
    values.pop()
    return torch.stack(same).sum(0)


def add_to_result(stage: nn.Module, values: list[torch.Tensor]) -> torch.Tensor:
    same = stage(values)
    same.append(values[0])
    return torch.stack(values).sum(0)


def write_in_place(stage: nn.Module, values: list[torch.Tensor]) -> torch.Tensor:
    same = stage(values)
    same[0].add_(1)
    return values[0] * 2


def replace_in_dict(stage: nn.Module, values: list[torch.Tensor]) -> torch.Tensor:
    held = {"a": values[0], "b": values[1]}
    same = stage(held)
    held["a"] = held["a"] * 2
    return same["a"] - same["b"]


def keep_an_attribute(stage: nn.Module, values: list[torch.Tensor]) -> torch.Tensor:
    values[0].scale = 2.0  # type: ignore[attr-defined]
    return values[1] * stage(values[0]).scale


class Uses(nn.Module):
    def __init__(self, stage: nn.Module, use: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.stage, self.head = nn.Linear(4, 4), nn.Linear(4, 4), stage, nn.Linear(4, 2)
        self.use = use

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.use(self.stage, [self.first(x), self.second(x)]))


USES = [replace_first, drop_last, add_to_result, write_in_place, replace_in_dict, keep_an_attribute]


@pytest.mark.parametrize("names", [["head"], ["output"], ["first", "second", "head"]], ids=" ".join)
@pytest.mark.parametrize("stage", [nn.Identity(), nn.Sequential(nn.Identity(), nn.Identity())], ids=["one", "two"])
@pytest.mark.parametrize("use", USES)
def test_what_is_done_to_the_one_is_done_to_the_other(use: Any, stage: nn.Module, names: list[str]) -> None:
    model = Uses(stage, use).eval()
    expected = copy.deepcopy(model)(X)
    found = featx.create_feature_extractor(model, names, example_inputs=X)(X)
    assert torch.equal(found[names[-1]], expected)
    assert torch.equal(featx.trace(model, X)(X), expected)
