from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from featx import Graph, Node
from featx.ir.effects import Effects
from featx.ir.memory import MemoryGroups


def groups(graph: Graph) -> MemoryGroups:
    return MemoryGroups(graph, Effects(graph))


def test_fresh_result_is_a_group_of_its_own() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    doubled, negated = graph.call_function(torch.mul, (x, 2)), graph.call_function(torch.neg, (x,))
    memory = groups(graph)
    assert len({memory.of(x), memory.of(doubled), memory.of(negated)}) == 3


@pytest.mark.parametrize(
    "view",
    [
        lambda graph, x: graph.call_method("view", (x, -1)),
        lambda graph, x: graph.call_function(operator.getitem, (x, 0)),
        lambda graph, x: graph.call_function(getattr, (x, "T")),
        lambda graph, x: graph.call_method("add_", (x, 1)),
        lambda graph, x: graph.call_function(operator.getitem, (graph.call_method("chunk", (x, 2)), 1)),
        lambda graph, x: graph.call_method("flatten", (graph.call_method("permute", (x, 1, 0)),)),
        lambda graph, x: graph.call_function(functional.dropout, (x, 0.5, False)),
        lambda graph, x: graph.call_function(len, (x,)),
    ],
)
def test_what_may_be_a_view_is_in_the_group_of_what_it_views(view: Callable[[Graph, Node], Node]) -> None:
    graph = Graph()
    fresh = graph.call_function(torch.neg, (graph.placeholder("x"),))
    node = view(graph, fresh)
    memory = groups(graph)
    assert memory.of(node) == memory.of(fresh)
    assert not memory.is_external(node)


def test_result_that_may_view_either_input_joins_both() -> None:
    graph = Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    graph.call_function(max, (x, y))
    memory = groups(graph)
    assert memory.of(x) == memory.of(y)


def test_reads_of_one_attribute_are_one_group_and_others_are_not() -> None:
    graph = Graph()
    first, other, second = [graph.get_attr(path) for path in ("weight", "bias", "weight")]
    memory = groups(graph)
    assert memory.of(first) == memory.of(second) != memory.of(other)


def test_inputs_attributes_and_their_views_are_external_and_fresh_values_are_not() -> None:
    graph = Graph()
    x, weight = graph.placeholder("x"), graph.get_attr("weight")
    view = graph.call_method("t", (weight,))
    fresh = graph.call_function(torch.mul, (x, view))
    memory = groups(graph)
    assert [memory.is_external(node) for node in (x, weight, view, fresh)] == [True, True, True, False]
