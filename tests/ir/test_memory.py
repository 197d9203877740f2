from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
from torch import nn
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


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(2, 2), nn.Linear(2, 2)
        self.third = self.one
        self.other.bias = self.one.bias
        self.table = self.one.weight.detach()[0]
        self.apart = nn.Linear(2, 2)
        self.kept = [self.apart.weight]


def test_what_a_call_reads_and_writes() -> None:
    graph = Graph()
    x, table = graph.placeholder("x"), graph.get_attr("table")
    total = graph.call_method("add_", (x, table))
    norm = graph.call_module("norm", (total,))
    root = nn.Module()
    root.norm = nn.BatchNorm1d(2)
    root.register_buffer("table", torch.ones(2))
    memory = MemoryGroups(graph, Effects(graph, root))
    assert memory.read_by(x) == memory.written_by(x) == set()
    assert memory.read_by(table) == {memory.of(table)}
    assert memory.read_by(total) == {memory.of(x), memory.of(table)}
    assert memory.written_by(total) == {memory.of(x)}
    assert memory.read_by(norm) == {memory.of(x), memory.state_of(norm)}
    assert memory.written_by(norm) == {memory.state_of(norm)}
    root.norm.eval()
    assert MemoryGroups(graph, Effects(graph, root)).written_by(norm) == set()


def test_modules_and_tensors_under_two_paths_are_one_group_when_joined() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    one, third, other, apart = (graph.call_module(name, (x,)) for name in ("one", "third", "other", "apart"))
    table, bias, kept = (graph.get_attr(name) for name in ("table", "other.bias", "kept"))
    root = Tied()
    memory = MemoryGroups(graph, Effects(graph, root))
    assert memory.state_of(one) != memory.state_of(third)
    memory.join_shared_state(root)
    states = {memory.state_of(node) for node in (one, third, other)}
    assert states == {memory.of(table), memory.of(bias)}
    assert len(states) == 1
    assert memory.state_of(apart) == memory.of(kept) not in states
    assert memory.of(x) not in states


def test_joined_groups_are_external_if_one_of_them_is() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    fresh, other = graph.call_function(torch.neg, (x,)), graph.call_function(torch.neg, (x,))
    memory = groups(graph)
    memory.join(fresh, other)
    assert memory.of(fresh) == memory.of(other)
    assert not memory.is_external(other)
    memory.join(other, x)
    assert memory.is_external(fresh)
