"""What nodes read and write, and which of them must keep their order, on graphs of a few nodes worked out by hand."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from featx import Graph, GraphModule, Node
from featx.passes.accesses import DRAWS, MODES, Accesses


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.table = self.table + 1
        return x + self.table


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop, self.linear, self.own = nn.BatchNorm1d(2), nn.Dropout(), nn.Linear(2, 2), Own()
        self.table = nn.Parameter(torch.zeros(2))
        self.same_norm, self.tied = self.norm, self.table


def accesses_of(graph: Graph, result: Any, *, training: bool = False) -> Accesses:
    graph.output(result)
    return Accesses(GraphModule(Model().train(training), graph))


def order(accesses: Accesses, nodes: Iterable[Node], *, in_modes: bool = False) -> set[tuple[str, str]]:
    """Return all pairs of which the first must run before the second, by following those that are given."""
    nodes = list(nodes)
    pairs = {(first.name, second.name) for first, second in accesses.dependencies(nodes, in_modes=in_modes)}
    for middle in nodes:
        pairs |= {(first, second) for first, a in pairs if a == middle.name for b, second in pairs if b == middle.name}
    return pairs


def test_draws_and_seeds_are_one_cell() -> None:
    graph = Graph()
    one = graph.call_function(torch.rand, (2,))
    seed = graph.call_function(torch.manual_seed, (1,))
    other = graph.call_function(torch.rand, (2,))
    accesses = accesses_of(graph, (one, other))
    assert accesses.writes(one) == {DRAWS}
    assert accesses.writes(seed) == {DRAWS, MODES}
    assert accesses.sets_seed(seed)
    assert not accesses.sets_seed(one)
    assert order(accesses, [one, seed, other]) == {
        ("rand", "manual_seed"),
        ("manual_seed", "rand_1"),
        ("rand", "rand_1"),
    }


def test_readers_of_a_written_value_stay_on_their_side() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    before = graph.call_function(torch.neg, (x,))
    view = graph.call_method("view", (x, -1))
    write = graph.call_method("add_", (view, 1))
    after = graph.call_function(torch.abs, (x,))
    free = graph.call_function(torch.exp, (before,))
    accesses = accesses_of(graph, (before, after, free))
    assert order(accesses, [before, view, write, after, free]) == {
        ("neg", "add_"), ("view", "add_"), ("view", "abs_1"), ("neg", "abs_1"), ("add_", "abs_1"), ("neg", "exp"),
    }  # fmt: skip
    assert accesses.is_written(x)
    assert accesses.is_written(view)
    assert not accesses.is_written(before)


def test_switches_hold_what_is_between_them_where_modes_are_kept() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    before = graph.call_function(torch.neg, (x,))
    switch = graph.call_function(torch._C._set_grad_enabled, (False,))
    after = graph.call_function(torch.abs, (x,))
    accesses = accesses_of(graph, (before, after))
    nodes = [before, switch, after]
    assert order(accesses, nodes) == set()
    pairs = {("neg", "_set_grad_enabled"), ("_set_grad_enabled", "abs_1"), ("neg", "abs_1")}
    assert order(accesses, nodes, in_modes=True) == pairs


def test_inputs_may_be_one_tensor_as_soon_as_one_is_written() -> None:
    graph = Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    read = graph.call_function(torch.neg, (y,))
    write = graph.call_method("add_", (x, 1))
    accesses = accesses_of(graph, (read, write))
    assert accesses.cell_of(x) == accesses.cell_of(y)
    assert ("neg", "add_") in order(accesses, [read, write])


def test_inputs_that_nobody_writes_are_apart() -> None:
    graph = Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    accesses = accesses_of(graph, (x, y))
    assert accesses.cell_of(x) != accesses.cell_of(y)


def test_state_that_train_mode_would_write_is_known_in_eval_mode() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    norm, drop, linear = (graph.call_module(name, (x,)) for name in ("norm", "drop", "linear"))
    mean = graph.get_attr("norm.running_mean")
    accesses = accesses_of(graph, (norm, drop, linear, mean))
    assert [accesses.writes(node) for node in (norm, drop, linear)] == [set(), set(), set()]
    assert accesses.writes_in_other_mode(norm) == {accesses.state_of(norm)}
    assert accesses.writes_in_other_mode(drop) == {DRAWS, accesses.state_of(drop)}
    assert accesses.writes_in_other_mode(linear) == set()
    assert accesses.is_written_in_other_mode(mean)
    assert not accesses.is_written(mean)
    assert not accesses.is_state_written(norm)
    assert ("norm", "norm_running_mean") in order(accesses, [norm, drop, linear, mean])
    training = Accesses(GraphModule(Model().train(), graph))
    assert training.is_state_written(norm)
    assert training.is_written(mean)


def test_attribute_that_a_module_assigns_is_another_object_later() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    table, assigned = graph.get_attr("table"), graph.get_attr("own.table")
    call = graph.call_module("own", (x,))
    accesses = accesses_of(graph, (table, assigned, call))
    assert accesses.is_fixed_read(table)
    assert not accesses.is_fixed_read(assigned)
    assert not accesses.is_fixed_read(call)
    assert accesses.state == {accesses.cell_of(table), accesses.cell_of(assigned)}
    assert accesses.cell_of(assigned) == accesses.state_of(call)


def test_part_of_a_module_that_reads_what_a_module_assigns_reads_it_there() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    call = graph.call_module("own", (x,))
    graph.output(graph.call_function(operator.add, (call, graph.get_attr("own.table"))))
    gm = GraphModule(Model(), graph)
    reader = Graph()
    reader.output(reader.get_attr("own.table"))
    part = GraphModule(gm, reader)
    before = part()
    Accesses(gm).share_assigning_modules(part)
    gm(torch.zeros(2))
    assert torch.equal(before, torch.zeros(2))
    assert torch.equal(part(), torch.ones(2))


def test_what_the_model_has_under_two_paths_is_one_cell() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    norm, again = graph.call_module("norm", (x,)), graph.call_module("same_norm", (x,))
    table, tied = graph.get_attr("table"), graph.get_attr("tied")
    write = graph.call_method("add_", (table, 1))
    read = graph.call_function(torch.neg, (tied,))
    accesses = accesses_of(graph, (norm, again, write, read), training=True)
    assert accesses.state_of(norm) == accesses.state_of(again)
    assert {("norm", "same_norm"), ("add_", "neg")} <= order(accesses, [norm, again, table, tied, write, read])
