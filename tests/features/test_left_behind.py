"""What forward leaves for its next call, or takes from outside, is refused or followed by an extractor too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import featx


class Counting(nn.Module):
    """Counts its calls in an attribute, before everything that can be asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.last = 0, nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.last(x * self.calls)


class Rebinding(nn.Module):
    """Gives its buffer a new tensor in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.last = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        return self.last(x * self.calls)


class Dropping(nn.Module):
    """Sets an option of a layer of torch.nn."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.last = nn.Dropout(0.5), nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.drop.p = 0.25
        return self.last(self.drop(x))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Counting, Rebinding, Dropping])
def test_forward_that_no_graph_can_repeat_is_refused_and_leaves_the_model_as_it_was(kind: type[nn.Module]) -> None:
    model: Any = kind()
    with pytest.raises(featx.TraceError):
        featx.create_feature_extractor(model, ["last"], example_inputs=torch.rand(2, 4), tracer="example")
    if isinstance(model, Dropping):
        assert model.drop.p == 0.5
    else:
        assert model.calls == 0


def test_one_tensor_given_as_two_inputs_is_two_inputs() -> None:
    def function(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return first * 2 + second

    x, y = torch.rand(2, 3), torch.rand(2, 3)
    assert torch.equal(featx.trace(function, x, x)(x, y), function(x, y))


def test_inputs_that_the_example_did_not_have_are_refused() -> None:
    class Sum(nn.Module):
        def forward(self, x: torch.Tensor, *more: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
            return sum((*more, *named.values()), x)

    x = torch.rand(2, 3)
    traced = featx.trace(Sum(), x)
    assert torch.equal(traced(x), x)
    for args, kwargs in (((x, x), {}), ((x,), {"y": x})):
        with pytest.raises(featx.SpecializationError, match=r"more|named"):
            traced(*args, **kwargs)


@pytest.mark.slow
def test_long_chain_of_sums_of_one_value_is_walked_once() -> None:
    class Chain(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(2000):
                x = x + x
            return x

    x = torch.zeros(2)
    assert torch.equal(featx.create_feature_extractor(Chain(), ["add_1999"], example_inputs=x)(x)["add_1999"], x)


class Setting(nn.Module):
    """Sets on a layer of its own what that has already: nothing that a graph would miss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = Optional(), nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.layer.is_causal = False
        return self.last(self.layer(x))


class Optional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.is_causal = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.tril() if self.is_causal else x * 2


def test_assignment_of_the_same_value_to_a_child_that_is_kept_whole() -> None:
    model = Setting()
    extractor = featx.create_feature_extractor(model, ["layer", "last"], example_inputs=torch.randn(2, 4))
    x = torch.randn(3, 4)
    assert torch.equal(extractor(x)["last"], model(x))


class Unused(nn.Module):
    """Has a layer that it does not call, of a class that assigns attributes in its own methods."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.last = nn.LSTM(4, 4), nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(x * 2)


def test_layer_that_is_not_called_is_no_obstacle() -> None:
    model = Unused()
    extractor = featx.create_feature_extractor(model, ["last"], example_inputs=torch.randn(2, 4))
    x = torch.randn(3, 4)
    assert torch.equal(extractor(x)["last"], model(x))
