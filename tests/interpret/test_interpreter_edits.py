"""Graphs that are edited between runs of an Interpreter, or while it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import featx
from featx import Graph, GraphModule, Interpreter, Node
from featx.errors import GraphError


def two_steps() -> tuple[GraphModule, Node, Node]:
    """Return (x + 1) * 2 and its two nodes."""
    graph = Graph()
    first = graph.call_function(torch.add, (graph.placeholder("x"), 1))
    second = graph.call_function(torch.mul, (first, 2))
    graph.output(second)
    return GraphModule(nn.Module(), graph), first, second


class Editing(Interpreter):
    """Calls a function when a node has run."""

    def __init__(self, module: GraphModule, edit: Callable[[Node], Any], after: str = "add", **kwargs: Any) -> None:
        super().__init__(module, **kwargs)
        self.edit = edit
        self.after = after

    def run_node(self, n: Any):
        result = super().run_node(n)
        if n.name == self.after:
            self.edit(n)
        return result


X = torch.tensor([3.0])


def test_edit_between_two_runs_is_seen() -> None:
    module, first, second = two_steps()
    interpreter = Interpreter(module)
    assert interpreter.run(X) == 8
    with module.graph.inserting_before(second):
        # Reads the input after what was its last use.
        extra = module.graph.call_function(torch.sub, (first, first.args[0]))
    second.args = (extra, 5)
    assert interpreter.run(X) == 5
    second.target = torch.sub
    assert interpreter.run(X) == -4


def test_input_that_is_added_between_two_runs_is_expected() -> None:
    module, first, _ = two_steps()
    interpreter = Interpreter(module)
    assert interpreter.run(X) == 8
    with module.graph.inserting_before(first):
        first.args = (first.args[0], module.graph.placeholder("y"))
    assert interpreter.run(X, 2) == 10
    assert interpreter.boxed_run([X, 3]) == 12


def test_graph_that_is_assigned_to_the_module_runs() -> None:
    module, _, _ = two_steps()
    interpreter = Interpreter(module)
    other, _, second = two_steps()
    second.args = (second.args[0], 10)
    module.graph = other.graph
    assert interpreter.run(X) == 40


def test_another_graph_with_as_many_edits_is_not_taken_for_the_same() -> None:
    one, other = Graph(), Graph()
    one.output(one.call_function(torch.neg, (one.placeholder("x"),)))
    other.output([other.placeholder("x"), other.placeholder("y")])
    assert one.edits == other.edits
    interpreter = Interpreter(nn.Module(), graph=one)
    assert interpreter.boxed_run([X]) == -3
    interpreter.graph = other
    assert interpreter.boxed_run([X, 7]) == [X, 7]


def test_node_that_is_inserted_behind_the_running_one_runs() -> None:
    def edit(node: Node) -> None:
        with module.graph.inserting_after(node):
            extra = module.graph.call_function(torch.neg, (node,))
        second.args = (extra, 2)

    module, _, second = two_steps()
    assert Editing(module, edit).run(X) == -8


def test_node_that_is_replaced_while_the_graph_runs_is_passed_over() -> None:
    def edit(node: Node) -> None:
        second.replace_all_uses_with(node)
        module.graph.erase_node(second)

    module, _, second = two_steps()
    assert Editing(module, edit).run(X) == 4


def test_value_that_gets_a_later_use_while_its_last_one_runs_is_not_dropped() -> None:
    def edit(node: Node) -> None:
        second.args = (second.args[0], node.args[0])

    module, _, second = two_steps()
    assert Editing(module, edit).run(X) == 12


def test_value_that_gets_a_later_use_when_it_was_dropped_is_an_error() -> None:
    def edit(node: Node) -> None:
        module.graph.output_node().args = (first.args[0],)

    module, first, _ = two_steps()
    with pytest.raises(GraphError, match=r"'output' reads 'x', .* dropped; .* garbage_collect_values=False"):
        Editing(module, edit, after="mul").run(X)
    module, first, _ = two_steps()
    assert Editing(module, edit, after="mul", garbage_collect_values=False).run(X) == 3


def test_no_value_is_dropped_by_what_was_known_before_an_edit() -> None:
    def edit(node: Node) -> None:
        with module.graph.inserting_after(second):
            last = module.graph.call_function(torch.sub, (second, node))
        module.graph.output_node().args = (last,)

    module, _, second = two_steps()
    # `add` was last read by `mul`, and is read again after it now.
    assert Editing(module, edit).run(X) == 4


def test_dual_module_is_interpreted_in_its_present_mode() -> None:
    class Branch(nn.Module):
        def forward(self, x: torch.Tensor):
            return x + 1 if self.training else x * 10

    model = Branch().eval()
    train, evaluation = featx.Tracer().trace(Branch().train()), featx.Tracer().trace(Branch().eval())
    dual = featx.DualGraphModule(model, train, evaluation)
    interpreter = Interpreter(dual)
    assert interpreter.run(X) == 30
    dual.train()
    assert interpreter.run(X) == 4
    assert interpreter.graph is train
    dual.eval()
    assert interpreter.run(X) == 30
