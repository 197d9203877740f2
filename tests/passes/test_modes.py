"""Which switches are in force at a node, and how they are written into another graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from featx import Graph, GraphModule, Node, trace
from featx.errors import PassError
from featx.passes.accesses import Accesses
from featx.passes.modes import Mode, Modes, ModeWriter
from featx.passes.partial_copy import PartialCopy

X = torch.arange(4.0).reshape(2, 2)


def traced(forward: Callable[..., Any]) -> tuple[GraphModule, Modes, dict[str, Node]]:
    gm = trace(forward, X)
    return gm, Modes(gm.graph, Accesses(gm)), {node.name: node for node in gm.graph.nodes}


def nested(x: torch.Tensor) -> Any:
    a = torch.relu(x)
    with torch.no_grad():
        b = torch.exp(a)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with torch.enable_grad():
                c = torch.neg(a)
            d = torch.abs(c)
    return torch.sin(d), a, b, c


def test_mode_of_a_node_is_what_was_switched_ahead_of_it() -> None:
    _, modes, nodes = traced(nested)
    assert modes.at(nodes["relu"]) == Mode()
    assert modes.at(nodes["exp"]) == Mode(gradients=False)
    (region,) = modes.at(nodes["neg"]).regions
    assert modes.at(nodes["neg"]).gradients is True
    assert modes.at(nodes["abs_1"]) == Mode(gradients=False, regions=(region,))
    assert modes.at(nodes["sin"]) == Mode()


def test_switches_are_told_from_calls() -> None:
    _, modes, nodes = traced(nested)
    calls = {"x", "check_is_tensor", "relu", "exp", "neg", "abs_1", "sin", "output"}
    assert {name for name, node in nodes.items() if not modes.is_switch(node)} == calls


def test_seed_is_no_switch() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    seed = graph.call_function(torch.manual_seed, (1,))
    graph.output(x)
    modes = Modes(graph, Accesses(GraphModule(nn.Module(), graph)))
    assert not modes.is_switch(seed)


@pytest.mark.parametrize("order", [["relu", "exp", "neg", "abs_1", "sin"], ["relu", "exp", "abs_1"]])
def test_copied_nodes_run_in_their_modes_and_the_caller_gets_his_back(order: list[str]) -> None:
    gm, modes, nodes = traced(nested)
    copy = PartialCopy(gm.graph, modes)
    copy.add(nodes["x"])
    for name in order:
        if name == "abs_1" and "neg" not in order:
            copy.let_stand_for(nodes["neg"], copy.of(nodes["exp"]))
        copy.add(nodes[name])
    module = GraphModule(gm, copy.finish(tuple(nodes[name] for name in order)))
    module.graph.lint()
    expected = {"relu": True, "exp": False, "neg": True, "abs_1": False, "sin": False}
    x = X.clone().requires_grad_()
    assert [value.requires_grad for value in module(x)] == [expected[name] for name in order]
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")


def test_mode_that_is_computed_cannot_be_set_again() -> None:
    gm, modes, nodes = traced(lambda x: x + 1)
    writer = ModeWriter(gm.graph)
    for mode in (Mode(gradients=nodes["add"]), Mode(others=1)):
        with pytest.raises(PassError, match=r"'add' at .*test_modes.py:\d+ runs in a mode that cannot be set again"):
            writer.switch_to(mode, nodes["add"])
    assert modes.at(nodes["add"]) == Mode()
