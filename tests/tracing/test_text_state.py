"""Texts and other plain values outside of modules: a trace puts back what forward sets there, or refuses the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import featx

X = torch.rand(3, 4, generator=torch.Generator().manual_seed(0))
STATE = "cold"
KEPT: dict[str, Any] = {}


class OfClass(nn.Module):
    state = "cold"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        type(self).state = "warm"
        return x * 2


class OfFile(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        global STATE
        STATE = "warm"
        return x * 2


class OfDict(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        KEPT["state"] = b"warm"
        return x * 2


class OfDefault(nn.Module):
    def note(self, name: str, seen: list[str] = []) -> None:  # noqa: B006
        if name not in seen:
            seen.append(name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.note("x")
        return x * 2


def what_is_kept() -> list[Any]:
    defaults: Any = OfDefault.note.__defaults__
    return [OfClass.state, STATE, dict(KEPT), list(defaults[0])]


@pytest.mark.parametrize("kind", [OfClass, OfFile, OfDict, OfDefault])
def test_root_that_sets_a_text_outside_of_its_modules_is_refused(kind: type[nn.Module]) -> None:
    with pytest.raises(featx.TraceError, match="changes the value"):
        featx.create_feature_extractor(kind(), ["mul"], example_inputs=X)
    assert what_is_kept() == ["cold", "cold", {}, []]


@pytest.mark.parametrize("kind", [OfClass, OfFile, OfDict, OfDefault])
def test_submodule_that_sets_a_text_outside_is_kept_whole(kind: type[nn.Module]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(kind()), nn.ReLU())
    extractor = featx.create_feature_extractor(model, ["1.0", "2"], example_inputs=X)
    assert what_is_kept() == ["cold", "cold", {}, []]
    features = extractor(X)
    assert what_is_kept() != ["cold", "cold", {}, []]  # the module itself runs
    expected = model[0](X) * 2
    assert torch.equal(features["1.0"], expected)
    assert torch.equal(features["2"], expected.relu())


@pytest.fixture(autouse=True)
def as_before() -> Any:
    yield
    global STATE
    STATE = OfClass.state = "cold"
    KEPT.clear()
    defaults: Any = OfDefault.note.__defaults__
    defaults[0].clear()
