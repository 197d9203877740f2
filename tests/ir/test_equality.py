"""is_same_graph: two graphs are the same if their nodes are, one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from featx import Graph
from featx.ir.equality import is_same, is_same_graph


def graph_of(*arguments: Any, function: Callable[..., Any] = torch.add, **keywords: Any) -> Graph:
    graph = Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(function, (x, *arguments), keywords))
    return graph


VALUES: list[Any] = [
    1, 1.0, True, None, "a", (1, 2), [1, 2], (1, (2, 3)), {"a": 1}, float("inf"), slice(1, 2), torch.float32,
    torch.device("cpu"),
]  # fmt: skip


@pytest.mark.parametrize("one", VALUES, ids=repr)
@pytest.mark.parametrize("other", VALUES, ids=repr)
def test_arguments_decide(one: Any, other: Any) -> None:
    assert is_same_graph(graph_of(one), graph_of(other)) is (one is other)
    assert is_same_graph(graph_of(alpha=one), graph_of(alpha=other)) is (one is other)


def test_float_that_is_not_a_number_equals_itself() -> None:
    assert is_same_graph(graph_of(float("nan")), graph_of(float("nan")))


def test_zero_with_a_sign_is_another_number() -> None:
    assert not is_same_graph(graph_of(0.0), graph_of(-0.0))


def test_tensors_are_compared_by_value_shape_and_dtype() -> None:
    assert is_same_graph(graph_of(torch.ones(2)), graph_of(torch.ones(2)))
    for other in (torch.zeros(2), torch.ones(1), torch.ones(2, dtype=torch.float64)):
        assert not is_same_graph(graph_of(torch.ones(2)), graph_of(other))


def test_target_keywords_and_names_count() -> None:
    assert not is_same_graph(graph_of(1), graph_of(1, function=torch.mul))
    assert not is_same_graph(graph_of(alpha=1), graph_of(beta=1))
    named = Graph()
    x = named.placeholder("x")
    named.output(named.create_node("call_function", torch.add, (x, 1), {}, "total"))
    assert not is_same_graph(graph_of(1), named)


def test_which_node_is_read_counts() -> None:
    def two(reads_second: bool) -> Graph:
        graph = Graph()
        nodes = [graph.placeholder("x"), graph.placeholder("y")]
        graph.output(nodes[reads_second])
        return graph

    assert is_same_graph(two(True), two(True))
    assert not is_same_graph(two(True), two(False))


def test_number_of_nodes_counts() -> None:
    longer = graph_of(1)
    longer.placeholder("unused")
    assert not is_same_graph(longer, graph_of(1))
    assert not is_same_graph(graph_of(1), longer)


def test_arrays_are_compared_without_an_error() -> None:
    array = np.arange(3)
    assert is_same(array, array)
    assert not is_same(array, np.arange(3))
