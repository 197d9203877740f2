"""Replacements stand after what they read and before what reads them; what must move for that moves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peer import count_replaced, neg_relu

import featx


def both(x: Any, a: Any, b: Any) -> Any:
    return torch.matmul(x, a), torch.matmul(x, b)


def both_at_once(x: Any, a: Any, b: Any) -> Any:
    product = torch.matmul(x, torch.stack([a, b]))
    return product[0], product[1]


def order(module: featx.GraphModule) -> list[str]:
    return [node.name for node in module.graph.nodes]


def test_replacement_goes_ahead_of_the_first_reader() -> None:
    module = featx.symbolic_trace(lambda x: torch.sigmoid(x) * torch.neg(torch.relu(x)))
    featx.replace_pattern(module, lambda x: torch.sigmoid(x), lambda x: torch.tanh(x))
    assert order(module) == ["x", "relu", "neg", "tanh", "mul", "output"]


def test_replacement_of_what_nobody_reads_stays_at_its_place() -> None:
    graph = featx.Graph()
    x = graph.placeholder("x")
    graph.call_function(torch.sigmoid, (x,))
    graph.output(graph.call_function(torch.relu, (x,)))
    module = featx.GraphModule(torch.nn.Module(), graph)
    featx.replace_pattern(module, lambda x: torch.sigmoid(x), lambda x: torch.tanh(x))
    assert order(module) == ["x", "tanh", "relu", "output"]


def test_late_input_moves_up_with_what_it_depends_on() -> None:
    def model(x: Any, a: Any, b: Any) -> Any:
        first = torch.matmul(x, a).abs()
        half = b * 2
        return first + torch.matmul(x, half.t())

    module = featx.symbolic_trace(model)
    assert len(featx.replace_pattern(module, both, both_at_once)) == 1
    assert order(module)[:6] == ["x", "a", "b", "mul", "t", "stack"]
    x, a, b = [torch.arange(4.0).view(2, 2) + number for number in range(3)]
    assert torch.equal(module(x, a, b), model(x, a, b))


def draws_late(x: Any, a: Any, b: Any) -> Any:
    first = torch.matmul(x, a).abs()
    return torch.dropout(first, 0.5, True) + torch.matmul(x, torch.dropout(b, 0.5, True))


def test_late_input_that_draws_random_numbers_does_not_move() -> None:
    module = featx.symbolic_trace(draws_late)
    assert featx.replace_pattern(module, both, both_at_once) == []


def test_late_input_that_the_replacement_does_not_read_is_no_hindrance() -> None:
    module = featx.symbolic_trace(draws_late)
    assert len(featx.replace_pattern(module, both, lambda x, a, b: (x, a))) == 1
    module.graph.lint()


def test_late_input_that_is_an_input_of_the_graph_does_not_move() -> None:
    graph = featx.Graph()
    x, a = graph.placeholder("x"), graph.placeholder("a")
    first = graph.call_method("abs", (graph.call_function(torch.matmul, (x, a)),))
    unused, b = graph.placeholder("unused"), graph.placeholder("b")
    second = graph.call_function(torch.matmul, (x, b))
    graph.output(graph.call_function(torch.add, (first, graph.call_function(torch.add, (second, unused)))))
    module = featx.GraphModule(torch.nn.Module(), graph)
    assert featx.replace_pattern(module, both, both_at_once) == []
    assert [node.name for node in graph.nodes if node.op == "placeholder"] == ["x", "a", "unused", "b"]


def replaced_first(x: Any, a: Any, b: Any, y: Any, c: Any) -> Any:
    one = torch.matmul(x, a)
    early = torch.matmul(y, c).abs()
    other = torch.matmul(x, b)
    return early, torch.matmul(y, other), one


def replaced_last(x: Any, a: Any, b: Any, y: Any, c: Any) -> Any:
    early = torch.matmul(y, c).abs()
    one, other = torch.matmul(x, a), torch.matmul(x, b)
    return early, torch.matmul(y, other), one


@pytest.mark.parametrize("model", [replaced_first, replaced_last])
def test_late_input_that_is_itself_replaced_moves_up(model: Callable[..., Any]) -> None:
    module = featx.symbolic_trace(model)
    assert len(featx.replace_pattern(module, both, both_at_once)) == 2
    inputs = [torch.arange(4.0).view(2, 2) + number for number in range(5)]
    assert str(module(*inputs)) == str(model(*inputs))


def test_late_input_whose_replacement_writes_does_not_move_without_the_write() -> None:
    def replacement(x: Any, a: Any, b: Any) -> Any:
        product = torch.matmul(x, torch.stack([a, b])) - 1
        product.add_(1)
        return product[0], product[1]

    module = featx.symbolic_trace(replaced_first)
    assert len(featx.replace_pattern(module, both, replacement)) == 1
    inputs = [torch.arange(4.0).view(2, 2) + number for number in range(5)]
    assert str(module(*inputs)) == str(replaced_first(*inputs))


def test_replacements_stand_in_the_order_of_what_they_feed() -> None:
    def model(x: Any) -> Any:
        for _ in range(6):
            x = neg_relu(x) + neg_relu(torch.sin(x))
        return x

    assert count_replaced(model, neg_relu, lambda x: torch.neg(torch.clamp_min(x, 0))) == 12
