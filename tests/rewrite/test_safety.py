"""What would change the rest of the graph is not replaced; what would not, is. Values come from the eager model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peer import absolute, count_replaced, neg_relu, ones
from torch import nn
from torch.nn import functional

import featx

Function = Callable[..., Any]


def half(x: Any) -> Any:
    return functional.dropout(x, 0.5, True)


def neg_clamp(x: Any) -> Any:
    return torch.neg(torch.clamp_min(x, 0))


# -- between the nodes of a match --------------------------------------------------------------------------------------


def written_in_between(x: Any) -> Any:
    inner = torch.relu(x)
    x.add_(1)
    return torch.neg(inner)


def drawn_in_between(x: Any) -> Any:
    inner, other = torch.relu(half(x)), half(x)
    return torch.neg(inner) + other


def drops_relu(x: Any) -> Any:
    return torch.neg(torch.relu(half(x)))


def switched_in_between(x: Any) -> Any:
    inner = torch.relu(x)
    with torch.no_grad():
        return torch.neg(inner)


def read_in_between(x: Any) -> Any:
    fresh = x * 2
    added = fresh.add_(1)
    other = fresh * 3
    return torch.neg(added) + other


def checked_in_between(x: Any) -> Any:
    dropped = half(x)
    torch._assert(x.sum() > 0, "positive")
    return torch.neg(torch.relu(dropped))


@pytest.mark.parametrize(
    ("model", "pattern", "replacement"),
    [
        (written_in_between, neg_relu, neg_clamp),
        (drawn_in_between, drops_relu, lambda x: torch.neg(torch.clamp_min(half(x), 0))),
        (switched_in_between, neg_relu, neg_clamp),
        (read_in_between, lambda x: torch.neg(x.add_(1)), lambda x: torch.negative(x.add_(1))),
        (checked_in_between, drops_relu, lambda x: torch.neg(torch.clamp_min(half(x), 0))),
    ],
)
def test_match_that_something_with_an_effect_divides_is_not_replaced(
    model: Function, pattern: Function, replacement: Function
) -> None:
    assert count_replaced(model, pattern, replacement) == 0


def other_written_in_between(x: Any) -> Any:
    inner, other = torch.relu(x), x * 2.0
    other.add_(1)
    return torch.neg(inner) + other


def pure_between_draws(x: Any) -> Any:
    dropped = half(x)
    inner = torch.relu(dropped)
    other = half(x)
    return torch.neg(inner) + other


def drawn_and_read_in_between(x: Any) -> Any:
    inner = torch.relu(half(x))
    other = x.sum() * 2
    return torch.neg(inner) + other


@pytest.mark.parametrize(
    ("model", "pattern", "replacement"),
    [
        (other_written_in_between, neg_relu, neg_clamp),
        (pure_between_draws, neg_relu, neg_clamp),
        (drawn_and_read_in_between, drops_relu, lambda x: torch.neg(torch.clamp_min(half(x), 0))),
    ],
)
def test_match_that_something_harmless_divides_is_replaced(
    model: Function, pattern: Function, replacement: Function
) -> None:
    assert count_replaced(model, pattern, replacement) == 1


def test_match_with_an_effect_stays_where_it_was() -> None:
    def model(x: Any) -> Any:
        first, second = half(x), half(x * 2)
        return second - first  # before which torch.fx puts the replacement of the first

    assert count_replaced(model, half, lambda x: half(x).abs() * x.sign()) == 2


def test_early_reader_of_a_match_that_must_stay_rules_it_out() -> None:
    def model(x: Any) -> Any:
        first = half(x)
        early = first * 2
        return torch.neg(first) + early

    def pattern(x: Any) -> Any:
        first = half(x)
        return first, torch.neg(first)

    def replacement(x: Any) -> Any:
        first = half(x)
        return first, torch.negative(first)

    assert count_replaced(model, pattern, replacement) == 0
    assert count_replaced(lambda x: sum(pattern(x)), pattern, replacement) == 1


# -- modules and guards ------------------------------------------------------------------------------------------------


class Normalized(nn.Module):
    def __init__(self, *, reads: bool) -> None:
        super().__init__()
        self.conv, self.bn, self.reads = nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), reads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value = self.bn(self.conv(x))
        mean = self.bn.running_mean * 1 if self.reads else 1
        return torch.relu(value) * torch.as_tensor(mean).sum()


class BatchNormRelu(Normalized):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.bn(x))


@pytest.mark.parametrize(("reads", "training", "count"), [(True, True, 0), (False, True, 1), (True, False, 1)])
def test_statistics_that_are_read_between_are_read_after_they_were_written(
    reads: bool, training: bool, count: int
) -> None:
    model, x = Normalized(reads=reads).train(training), torch.randn(3, 1, 2, 2)
    module = featx.symbolic_trace(copy.deepcopy(model))
    parts = BatchNormRelu(reads=False).train(training)
    assert len(featx.replace_pattern(module, parts, parts)) == count
    assert torch.equal(module(x), model(x))
    assert torch.equal(module.bn.running_mean, model.bn.running_mean)


def test_guard_that_reads_an_inner_value_keeps_the_match() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        inner = torch.relu(x)
        return torch.neg(inner) if inner.shape[0] == 4 else inner

    module = featx.trace(model, torch.ones(4))
    checks = [node for node in module.graph.nodes if node.meta.get("is_guard")]
    assert checks
    assert featx.replace_pattern(module, neg_relu, absolute) == []


def test_guards_stay_ahead_of_what_they_were_ahead_of() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return torch.neg(torch.relu(x)) if x.shape[0] == 4 else x

    module = featx.trace(model, torch.ones(4))
    assert len(featx.replace_pattern(module, neg_relu, neg_clamp)) == 1
    assert torch.equal(module(*ones()), model(*ones()))
    with pytest.raises(featx.SpecializationError):
        module(torch.ones(5))
