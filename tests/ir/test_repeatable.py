from __future__ import annotations

import math
import operator
from typing import Any

import pytest
import torch
import torchvision
from torch import nn
from torch.nn import functional

from featx import Graph, GraphModule
from featx.ir.effects import Effects, MeasuredEffects
from featx.ir.repeatable import RepeatableCalls, depends_on_mode, has_hooks, is_known_module, may_draw
from tests.ids import without_address


def own(x: Any) -> Any:
    return x


FUNCTIONS: dict[Any, bool] = {
    torch.relu: True, functional.softmax: True, functional.interpolate: True, operator.add: True, math.floor: True,
    getattr: True, len: True, max: True, operator.getitem: True, torch.ops.aten.relu.default: True,
    torch.ops.torchvision.nms.default: True, torch.linalg.norm: True, torch.zeros: True, torch.arange: True,
    torch.cat: True, torch.einsum: True,
    # They write, draw, change how later code runs, or are not known.
    torch.relu_: False, operator.iadd: False, operator.setitem: False, torch.rand: False, functional.dropout: False,
    torch.manual_seed: False, torch._C._set_grad_enabled: False, own: False, print: False, functional.batch_norm: False,
    torch.ops.aten.rand.default: False, torch._assert: False, dict: False, list: False,
    torch.is_grad_enabled: False, getattr(operator, "call", print): False,
}  # fmt: skip


@pytest.mark.parametrize(("function", "expected"), FUNCTIONS.items(), ids=without_address)
def test_functions_that_only_compute_a_value(function: Any, expected: bool) -> None:
    graph = Graph()
    node = graph.call_function(function, (graph.placeholder("x"), 1))
    assert RepeatableCalls(Effects(graph)).has(node) is expected


METHODS = {
    "relu": True, "sum": True, "view": True, "size": True, "float": True, "__getitem__": True, "__radd__": True,
    "relu_": False, "bernoulli": False, "append": False, "__setitem__": False, "__iadd__": False, "backward": False,
    "forward": False, "__call__": False, "numpy": False, "item": True,
}  # fmt: skip


@pytest.mark.parametrize(("method", "expected"), METHODS.items())
def test_methods_that_only_compute_a_value(method: str, expected: bool) -> None:
    graph = Graph()
    node = graph.call_method(method, (graph.placeholder("x"), 1))
    assert RepeatableCalls(Effects(graph)).has(node) is expected


class Own(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def hooked() -> nn.Module:
    module = nn.Linear(2, 2)
    module.register_forward_hook(lambda *_: None)
    return module


def patched() -> nn.Module:
    module = nn.Linear(2, 2)
    module.forward = lambda x: x  # type: ignore[method-assign]
    return module


@pytest.mark.parametrize(
    ("module", "known", "draws", "by_mode"),
    [
        (nn.Linear(2, 2), True, False, False),
        (nn.BatchNorm1d(2), True, False, True),
        (nn.BatchNorm1d(2, track_running_stats=False), True, False, False),
        (nn.Dropout(), True, True, True),
        (nn.Sequential(nn.Linear(2, 2), nn.Dropout()), True, True, True),
        (nn.MultiheadAttention(4, 2, dropout=0.1), True, True, True),
        (nn.LSTM(2, 2), True, False, False),
        (nn.FractionalMaxPool2d(2, output_size=1).eval(), True, True, True),
        (torchvision.ops.FrozenBatchNorm2d(2), True, True, True),
        (Own(), False, True, True),
        (nn.Sequential(Own()), False, True, True),
        (hooked(), False, False, False),
        (patched(), False, False, False),
    ],
)
def test_what_is_known_of_modules(module: nn.Module, known: bool, draws: bool, by_mode: bool) -> None:
    assert is_known_module(module) is known
    assert may_draw(module) is draws
    assert depends_on_mode(module) is by_mode


def test_hooks_inside_count() -> None:
    assert has_hooks(nn.Sequential(hooked()))
    assert not has_hooks(nn.Sequential(nn.Linear(2, 2)))


def test_modules_are_judged_in_their_mode() -> None:
    graph = Graph()
    node = graph.call_module("0", (graph.placeholder("x"),))
    graph.output(node)
    gm = GraphModule(nn.Sequential(nn.Dropout()), graph)
    assert not RepeatableCalls(Effects(graph, gm.train())).has(node)
    assert RepeatableCalls(Effects(graph, gm.eval())).has(node)


def test_call_that_may_write_a_literal_is_not_repeatable() -> None:
    graph = Graph()
    literal = torch.zeros(2)
    plain = graph.call_function(torch.add, (literal, 1))
    into = graph.call_function(torch.add, (1, 2), {"out": literal})
    maybe = graph.call_function(functional.relu, (literal,))
    calls = RepeatableCalls(Effects(graph))
    assert [calls.has(node) for node in (plain, into, maybe)] == [True, False, False]


def test_unknown_call_is_not_repeatable_although_it_was_seen_to_write_nothing() -> None:
    graph = Graph()
    node = graph.call_function(own, (graph.placeholder("x"),))
    node.meta["effects"] = MeasuredEffects()
    assert not RepeatableCalls(Effects(graph)).has(node)
