from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import featx


def noted(x: Any) -> Any:
    return x


def graph_with_unread(target: Any) -> featx.Graph:
    graph = featx.Graph()
    x = graph.placeholder("x")
    graph.call_function(target, (x,))
    graph.output(x)
    return graph


def test_marked_operator_stays_although_nobody_reads_it() -> None:
    # A library's operator whose schema says nothing of what it prints or counts.
    with torch.library._scoped_library("featx_tests", "DEF") as library:
        library.define("count(Tensor x) -> Tensor")
        operator = torch.ops.featx_tests.count.default
        graph = graph_with_unread(operator)
        assert graph.eliminate_dead_code()
        assert featx.has_side_effect(operator) is operator
        graph = graph_with_unread(operator)
        assert not graph.eliminate_dead_code()
        assert [node.is_impure() for node in graph.nodes] == [True, True, True]


def test_marked_call_without_a_node_among_its_arguments_stays() -> None:
    def tick() -> None:
        """Do nothing."""

    graph = featx.Graph()
    graph.call_function(featx.has_side_effect(tick))
    graph.output(graph.placeholder("x"))
    assert not graph.eliminate_dead_code(lambda node: node.is_impure(impure_random=False))


def test_mark_can_be_a_decorator() -> None:
    assert featx.has_side_effect(noted) is noted


def test_function_that_takes_no_mark_is_refused() -> None:
    with pytest.raises(featx.ArgumentTypeError, match="call it in a Python function"):
        featx.has_side_effect(torch.relu)


def test_marked_call_stays_in_an_extractor() -> None:
    seen: list[int] = []

    @featx.has_side_effect
    def count(x: Any) -> Any:
        seen.append(1)
        return x

    graph = featx.Graph()
    x = graph.placeholder("x")
    graph.call_function(count, (x,))
    relu = graph.call_function(torch.relu, (x,))
    graph.output(graph.call_function(torch.neg, (relu,)))
    pruned = featx.prune(graph, {"relu": relu}, nn.Module())
    assert [node.target for node in pruned.nodes if node.op == "call_function"] == [count, torch.relu]
    featx.GraphModule(nn.Module(), pruned)(torch.ones(2))
    assert seen == [1]
