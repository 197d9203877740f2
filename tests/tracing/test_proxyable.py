from __future__ import annotations

from typing import Any

import torch

import featx


class Pair(metaclass=featx.ProxyableClassMeta):
    def __init__(self, left: Any, right: Any = 0) -> None:
        self.left, self.right = left, right

    def total(self) -> Any:
        return self.left + self.right


class Named(Pair):
    pass


def test_constructor_with_a_proxy_at_any_depth_is_one_node() -> None:
    def function(x: Any) -> Any:
        return Pair([{"deep": x}, 1], right=2), Named(left=x).total()

    graph = featx.symbolic_trace(function).graph
    calls = [node for node in graph.nodes if node.op == "call_function"]
    x = next(iter(graph.nodes))
    assert [(node.target, node.kwargs) for node in calls] == [(Pair, {"right": 2}), (Named, {"left": x})]
    assert [node.target for node in graph.nodes if node.op == "call_method"] == ["total"]


def test_module_makes_the_object_and_calls_its_methods() -> None:
    module = featx.symbolic_trace(lambda x, y: Named(x, right=y).total() * 2)
    assert torch.equal(module(torch.ones(2), torch.ones(2)), torch.full((2,), 4.0))


def test_other_calls_make_objects() -> None:
    pair = Pair(1, 2)
    assert (type(pair), pair.total()) == (Pair, 3)
    graph = featx.symbolic_trace(lambda x: x + Pair(1, 2).total()).graph
    assert [(node.op, node.args[1:]) for node in graph.nodes][1] == ("call_function", (3,))
