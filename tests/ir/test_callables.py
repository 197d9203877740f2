"""What counts as a write by callables that are no functions, and by functions of Python that change what they get."""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from featx import Graph, GraphModule, passes, replace_pattern


def _adds(x: torch.Tensor) -> torch.Tensor:
    return x.add_(1)


class _Adder:
    def __init__(self, x: torch.Tensor) -> None:
        x.add_(1)


CALLED: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "partial": (functools.partial(operator.iadd), (1,)),
    "methodcaller": (operator.methodcaller("mul_", 3), ()),
    "class": (_Adder, ()),
    "function that calls another one": (checkpoint, ()),
    "operator.call": (operator.call, ()),
    "setattr": (setattr, ("data", torch.zeros(1))),
}


def graph_module(build: Callable[[Graph], None]) -> GraphModule:
    graph = Graph()
    build(graph)
    return GraphModule(nn.Module(), graph)


@pytest.mark.parametrize("name", CALLED)
def test_writes_of_called_objects_stay(name: str) -> None:
    called, args = CALLED[name]

    def build(graph: Graph) -> None:
        x = graph.placeholder("x")
        doubled = graph.call_function(operator.mul, (x, 2))
        if called is checkpoint:
            graph.call_function(called, (_adds, doubled), {"use_reentrant": False})
        elif called is operator.call:
            graph.call_function(called, (_adds, doubled))
        else:
            graph.call_function(called, (doubled, *args))
        graph.output(graph.call_function(operator.add, (doubled, graph.call_function(operator.mul, (x, 2)))))

    expected = graph_module(build)(torch.ones(1))
    changes: list[Callable[[GraphModule], Any]] = [
        passes.eliminate_dead_code,
        passes.eliminate_common_subexpressions,
        lambda gm: replace_pattern(gm, lambda x: x * 2, lambda x: torch.mul(x, 2)),
    ]
    for change in changes:
        changed = graph_module(build)
        change(changed)
        assert torch.equal(changed(torch.ones(1)), expected)


def _appends(graph: Graph) -> None:
    items = graph.call_method("tolist", (graph.placeholder("x"),))
    graph.call_function(list.append, (items, 9))
    graph.output(items)


def _concatenates(graph: Graph) -> None:
    items = graph.call_method("tolist", (graph.placeholder("x"),))
    graph.call_function(operator.iconcat, (items, [9]))
    graph.output(items)


def _goes_on(graph: Graph) -> None:
    rows = graph.call_function(iter, (graph.placeholder("x"),))
    graph.call_function(next, (rows,))
    graph.output(graph.call_function(next, (rows,)))


def _writes_a_row(graph: Graph) -> None:
    x = graph.placeholder("x")
    row = graph.call_method("__next__", (graph.call_method("__iter__", (x,)),))
    graph.call_method("add_", (row, 1))
    graph.output(x)


def _writes_by_an_array(graph: Graph) -> None:
    copied = graph.call_method("clone", (graph.placeholder("x"),))
    graph.call_function(operator.setitem, (graph.call_method("__array__", (copied,)), 0, 7))
    graph.output(copied)


def _writes_an_item(graph: Graph) -> None:
    copied = graph.call_method("clone", (graph.placeholder("x"),))
    graph.call_method("add_", (graph.call_function(operator.attrgetter("data"), (copied,)), 1))
    graph.output(copied)


def _writes_statistics(graph: Graph) -> None:
    x = graph.placeholder("x")
    mean, var = graph.call_function(torch.zeros, (3,)), graph.call_function(torch.ones, (3,))
    graph.call_function(torch.batch_norm_update_stats, (x, mean, var, 0.5))
    graph.output(mean)


@pytest.mark.parametrize(
    "build",
    [_appends, _concatenates, _goes_on, _writes_a_row, _writes_by_an_array, _writes_an_item, _writes_statistics],
)
def test_dead_code_is_none_that_something_sees(build: Callable[[Graph], None]) -> None:
    x = torch.arange(6.0).reshape(2, 3)
    expected = graph_module(build)(copy.deepcopy(x))
    changed = graph_module(build)
    passes.eliminate_dead_code(changed)
    found = changed(copy.deepcopy(x))
    assert (
        torch.equal(torch.as_tensor(found), torch.as_tensor(expected))
        if isinstance(found, torch.Tensor)
        else (found == expected)
    )


def test_a_tensor_that_stands_in_the_arguments_is_written() -> None:
    total = torch.zeros(2)

    def build(graph: Graph) -> None:
        graph.call_function(operator.iadd, (total, graph.placeholder("x")))
        graph.output(graph.call_function(torch.mul, (total, 2)))

    changed = graph_module(build)
    passes.eliminate_dead_code(changed)
    assert torch.equal(changed(torch.ones(2)), torch.full((2,), 2.0))


def test_a_match_is_not_moved_past_a_write_to_another_input() -> None:
    def build(graph: Graph) -> None:
        x, y = graph.placeholder("x"), graph.placeholder("y")
        positive = graph.call_function(torch.relu, (x,))
        graph.call_method("add_", (y, 10))
        graph.output(graph.call_function(operator.add, (positive, y)))

    changed = graph_module(build)
    replace_pattern(changed, lambda x: torch.relu(x), lambda x: x.relu())
    x = torch.ones(1)
    assert torch.equal(changed(x, x), torch.full((1,), 12.0))
