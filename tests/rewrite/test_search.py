"""The search goes back where a first try does not fit, and finds further outputs from what is matched already."""

from __future__ import annotations

import operator
import sys
from typing import Any

import pytest
import torch
from peer import count_replaced, matched_alike, neg_relu

import featx


def test_second_output_is_looked_for_among_the_readers_of_what_is_matched() -> None:
    def model(x: Any, y: Any) -> Any:
        return torch.sigmoid(x), torch.relu(y), torch.sigmoid(y), torch.relu(x), torch.relu(x)

    found = matched_alike(model, lambda x: (torch.sigmoid(x), torch.relu(x)))
    assert found == [
        {"sigmoid": "sigmoid", "x": "x", "relu": "relu_1"},
        {"sigmoid": "sigmoid_1", "x": "y", "relu": "relu"},
    ]


def test_outputs_without_a_common_input_are_paired_in_order() -> None:
    def model(x: Any, y: Any) -> Any:
        return torch.sigmoid(x), torch.relu(y), torch.sigmoid(y), torch.relu(x)

    assert matched_alike(model, lambda x, y: (torch.sigmoid(x), torch.relu(y))) == [
        {"sigmoid": "sigmoid", "x": "x", "relu": "relu", "y": "y"},
        {"sigmoid": "sigmoid_1", "x": "y", "relu": "relu_1", "y": "x"},
    ]


def test_output_whose_only_link_is_a_constant_is_looked_for_everywhere() -> None:
    def model(x: Any, y: Any) -> Any:
        return x.add(2), y.mul(3), y.mul(2)

    found = matched_alike(model, lambda x, y, n: (x.add(n), y.mul(n)))
    assert [match["mul"] for match in found] == ["mul_1"]


def test_far_output_is_found_down_several_readers() -> None:
    def model(x: Any) -> Any:
        start = torch.relu(x)
        near, other = torch.neg(start), torch.sin(torch.cos(start))
        return near, other, torch.tan(torch.cos(torch.abs(start))), torch.tan(torch.cos(start))

    def pattern(x: Any) -> Any:
        return torch.neg(x), torch.tan(torch.cos(x))

    assert [match["tan"] for match in matched_alike(model, pattern)] == ["tan_1"]


def test_failed_try_leaves_nothing_behind() -> None:
    def model(x: Any, y: Any) -> Any:
        wrong = torch.mul(torch.relu(x), torch.sigmoid(torch.neg(y)))
        return wrong + torch.mul(torch.relu(x), torch.sigmoid(torch.relu(y)))

    def pattern(x: Any, y: Any) -> Any:
        return torch.mul(torch.relu(x), torch.sigmoid(torch.relu(y)))

    assert [match["mul"] for match in matched_alike(model, pattern)] == ["mul_1"]


def test_exchanges_of_operands_are_tried_together() -> None:
    def model(x: Any, y: Any) -> Any:
        return (torch.relu(x) + torch.relu(y)) * (torch.sigmoid(y) + torch.relu(x))

    def pattern(a: Any, b: Any) -> Any:
        return (torch.sigmoid(a) + torch.relu(b)) * (torch.relu(b) + torch.relu(a))

    def other(a: Any, b: Any) -> Any:
        return (torch.sigmoid(a) + torch.relu(a)) * (torch.relu(b) + torch.relu(a))

    graph = featx.symbolic_trace(model).graph
    assert featx.SubgraphMatcher(pattern).match(graph) == []
    (match,) = featx.SubgraphMatcher(pattern, commutative=True).match(graph)
    assert str(match.placeholder_nodes) == "[y, x]"
    assert featx.SubgraphMatcher(other, commutative=True).match(graph) == []


@pytest.mark.parametrize("leaking", ["first", "second"])
def test_exchange_of_operands_avoids_an_inner_value_that_others_read(leaking: str) -> None:
    def model(x: Any, y: Any) -> Any:
        first, second = torch.relu(x), torch.relu(y)
        return (first + second) * (first if leaking == "first" else second)

    graph = featx.symbolic_trace(model).graph
    (match,) = featx.SubgraphMatcher(lambda x, y: torch.relu(x) + y, commutative=True).match(graph)
    assert (
        str(match.nodes_map)
        == {
            "first": "{add: add, relu: relu_1, x: y, y: relu}",
            "second": "{add: add, relu: relu, x: x, y: relu_1}",
        }[leaking]
    )


def test_exchanged_operands_of_one_call_are_one_match() -> None:
    graph = featx.symbolic_trace(lambda x, y: x + y).graph
    matcher = featx.SubgraphMatcher(lambda x, y: x + y, remove_overlapping_matches=False, commutative=True)
    assert len(matcher.match(graph)) == 1


def test_match_whose_input_depends_on_its_output_is_none() -> None:
    def model(x: Any) -> Any:
        inner = torch.relu(x)
        return inner + inner.sum()

    def pattern(x: Any, y: Any) -> Any:
        inner = torch.relu(x)
        return inner, inner + y

    assert matched_alike(model, pattern) == []
    assert len(matched_alike(lambda x, y: torch.relu(x) + y, lambda x, y: torch.relu(x) + y)) == 1


def test_output_that_an_unrelated_node_reads_early_is_no_cycle() -> None:
    def model(x: Any, y: Any) -> Any:
        inner = torch.relu(x)
        early = inner * 3
        return early, torch.neg(inner)

    def pattern(x: Any) -> Any:
        inner = torch.relu(x)
        return inner, torch.neg(inner)

    assert len(matched_alike(model, pattern)) == 1


@pytest.mark.slow
def test_long_chain_needs_no_recursion() -> None:
    def chain(length: int) -> featx.Graph:
        graph = featx.Graph()
        value = graph.placeholder("x")
        for _ in range(length):
            value = graph.call_function(torch.relu, (value,))
        graph.output(value)
        return graph

    long = 2 * sys.getrecursionlimit()
    assert len(featx.SubgraphMatcher(chain(long)).match(chain(2 * long + 1))) == 2


def test_many_readers_of_one_value_are_paired_each_once() -> None:
    graph = featx.Graph()
    x = graph.placeholder("x")
    values = [graph.call_function(function, (x,)) for function in (torch.sigmoid, torch.relu) for _ in range(300)]
    graph.output(tuple(values))
    found = featx.SubgraphMatcher(lambda x: (torch.sigmoid(x), torch.relu(x))).match(graph)
    pairs = [(values.index(one), values.index(other)) for one, other in [match.returning_nodes for match in found]]
    assert pairs == [(index, index + 300) for index in range(300)]


def test_equal_targets_are_enough() -> None:
    class Doubler:
        __name__ = "doubler"

        def __call__(self, x: Any) -> Any:
            return x * 2

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Doubler)

        def __hash__(self) -> int:
            return 1

    graphs: list[featx.Graph] = []
    for _ in range(2):
        graph = featx.Graph()
        graph.output(graph.call_function(Doubler(), (graph.placeholder("x"),)))
        graphs.append(graph)
    assert len(featx.SubgraphMatcher(graphs[0]).match(graphs[1])) == 1


def test_operators_and_functions_of_torch_are_different() -> None:
    graph = featx.symbolic_trace(lambda x, y: x + y).graph
    assert featx.SubgraphMatcher(lambda x, y: torch.add(x, y)).match(graph) == []
    assert graph.find_nodes(op="call_function", target=operator.add)
    assert count_replaced(neg_relu, lambda x: torch.neg(torch.relu(x)), lambda x: torch.neg(torch.clamp_min(x, 0))) == 1
