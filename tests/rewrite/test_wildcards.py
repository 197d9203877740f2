"""ANY and AnyOf in patterns."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peer import neg_relu
from torch import nn
from torch.nn import functional

import featx
from featx.rewrite import ANY, AnyOf

RELU = AnyOf(torch.relu, functional.relu, "relu", nn.ReLU)


def count(pattern: Callable[..., Any], model: Callable[..., Any]) -> int:
    return len(featx.SubgraphMatcher(pattern).match(featx.symbolic_trace(model).graph))


class Relus(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.module = nn.ReLU()
        self.other = nn.ReLU6()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.relu(torch.relu(x))
        return self.module(torch.sigmoid(x.relu())) + self.other(x)


def test_any_of_several_operations_matches_functions_methods_and_modules() -> None:
    module = featx.symbolic_trace(Relus())
    found = featx.SubgraphMatcher(lambda x: RELU(x)).match(module.graph)
    assert [str(match.returning_nodes) for match in found] == ["[relu]", "[relu_1]", "[relu_2]", "[module]"]


def test_any_of_several_operations_is_replaced() -> None:
    model, x = Relus(), torch.randn(4)
    module = featx.symbolic_trace(model)
    assert len(featx.replace_pattern(module, lambda x: RELU(x), lambda x: torch.clamp_min(x, 0))) == 4
    assert torch.equal(module(x), model(x))
    assert [node.op for node in module.graph.nodes].count("call_module") == 1


@pytest.mark.parametrize(
    ("other", "matches"), [(lambda x: torch.sigmoid(x), 0), (lambda x: functional.relu(x, inplace=True), 0)]
)
def test_any_of_several_operations_matches_no_other(other: Callable[..., Any], matches: int) -> None:
    assert count(lambda x: RELU(x), other) == matches


def test_choice_in_a_graph_made_by_hand() -> None:
    graph = featx.Graph()
    graph.output(graph.call_function(AnyOf(torch.neg, torch.abs), (graph.placeholder("x"),)))
    assert len(featx.SubgraphMatcher(graph).match(featx.symbolic_trace(neg_relu).graph)) == 1


@pytest.mark.parametrize(
    ("pattern", "model"),
    [
        (lambda x: torch.add(x, ANY), lambda x: torch.add(x, 2)),
        (lambda x: x * ANY, lambda x: x * 0.5),
        (lambda x: ANY * x, lambda x: 3 * x),
        (lambda x: x.view(ANY, -1), lambda x: x.view(2, -1)),
        (lambda x: x[:, ANY], lambda x: x[:, [0, 1]]),
        (lambda x: x[:, ANY], lambda x: x[:, 1:2]),
        (lambda x: torch.flatten(x, start_dim=ANY), lambda x: torch.flatten(x, start_dim=1)),
        (lambda x: functional.dropout(x, ANY, False), lambda x: functional.dropout(x, 0.1, False)),
        (lambda x: torch.permute(x, (ANY, 1)), lambda x: torch.permute(x, (0, 1))),
        (lambda x: x.sum(AnyOf(1, -1)), lambda x: x.sum(-1)),
    ],
)
def test_wildcard_matches_constants_in_any_argument(pattern: Callable[..., Any], model: Callable[..., Any]) -> None:
    assert count(pattern, model) == 1


@pytest.mark.parametrize(
    ("pattern", "model"),
    [
        (lambda x, y: torch.add(torch.neg(y), ANY) + x, lambda x, y: torch.add(torch.neg(y), x) + x),
        (lambda x: x[:, ANY], lambda x: x[:, x.sum() :]),
        (lambda x: x.sum(AnyOf(1, -1)), lambda x: x.sum(0)),
        (lambda x: x.sum(AnyOf(1, -1)), lambda x: x.sum(True)),
    ],
)
def test_wildcard_matches_nothing_else(pattern: Callable[..., Any], model: Callable[..., Any]) -> None:
    assert count(pattern, model) == 0


@pytest.mark.parametrize(
    "replacement", [lambda x: x * ANY, lambda x: RELU(x), lambda x: torch.cat([x, x], dim=AnyOf(0, 1))]
)
def test_replacement_with_a_wildcard_is_refused(replacement: Callable[..., Any]) -> None:
    with pytest.raises(featx.PatternError, match="which only a pattern can have"):
        featx.replace_pattern(featx.symbolic_trace(neg_relu), neg_relu, replacement)


def test_choice_does_not_run_on_real_values() -> None:
    with pytest.raises(featx.ArgumentTypeError, match=r"AnyOf\(relu, relu, 'relu', ReLU\) stands for an operation"):
        RELU(torch.ones(1))


def test_choice_of_nothing_is_refused() -> None:
    with pytest.raises(featx.ArgumentTypeError, match="at least one"):
        AnyOf()


@pytest.mark.slow
def test_wildcards_name_themselves_and_stay_wildcards_in_copies() -> None:
    pattern = copy.deepcopy(featx.Tracer().trace(lambda x: torch.add(x, ANY)))
    assert "(%x, ANY)" in str(pattern)
    assert len(featx.SubgraphMatcher(pattern).match(featx.symbolic_trace(lambda x: torch.add(x, 1)).graph)) == 1
