from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch

import featx
from featx.drawing.call_text import CallText


def described(make: Callable[[featx.Graph, featx.Node, featx.Node], featx.Node]) -> tuple[str, str]:
    graph = featx.Graph()
    node = make(graph, graph.placeholder("x"), graph.placeholder("y"))
    return CallText().of(node, node.all_input_nodes)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda g, x, y: g.call_function(torch.add, (y, x), {"alpha": 2}), ("add", "torch.add(⟨0⟩, ⟨1⟩, alpha=2)")),
        (lambda g, x, y: g.call_method("view", (x, 2, -1)), ("view", "⟨0⟩.view(2, -1)")),
        (lambda g, x, y: g.call_module("a.b", (x,), {"mask": y}), ("module", "self.a.b(⟨0⟩, mask=⟨1⟩)")),
        (lambda g, x, y: g.get_attr("a.w"), ("attribute", "self.a.w")),
        (lambda g, x, y: g.placeholder("z", default_value=None), ("input", "z = None")),
        (lambda g, x, y: g.output({"a": [x, y], "b": (x,)}), ("output", "return {'a': [⟨0⟩, ⟨1⟩], 'b': (⟨0⟩,)}")),
        (
            lambda g, x, y: g.call_function(operator.getitem, (x, (slice(None, 3), ...))),
            ("getitem", "operator.getitem(⟨0⟩, (slice(None, 3, None), Ellipsis))"),
        ),
        (lambda g, x, y: g.call_function(getattr, (x, "⟨0⟩")), ("getattr", "getattr(⟨0⟩, '<0>')")),
        (lambda g, x, y: g.call_function(torch.mul, (x, torch.ones(2, 3))), ("mul", "torch.mul(⟨0⟩, tensor(2×3))")),
    ],
)
def test_calls_are_code_with_slots_for_inputs(make: Any, expected: tuple[str, str]) -> None:
    assert described(make) == expected


def test_long_arguments_are_cut() -> None:
    _, call = described(lambda graph, x, y: graph.call_function(torch.stack, ([x] * 5000,)))
    assert call.startswith("torch.stack([⟨0⟩, ⟨0⟩, ")
    assert len(call) < 400
    _, call = described(lambda graph, x, y: graph.call_function(torch.relu, (x, "a" * 500)))
    assert len(call) < 100
