"""written: checked against the code that torch.fx generates, which is run."""

from __future__ import annotations

import enum
import math
import operator
from typing import Any

import pytest
import torch
import torch.fx
from torch import nn

import featx
from featx.interop.written import is_misread, is_written, last_readers


class Colour(enum.Enum):
    RED = 1


class Access(enum.Flag):
    READ = 1
    WRITE = 2


VALUES: list[Any] = [
    1, True, None, ..., "a'\n", b"\0", -1.5, math.inf, 1j, 1 + 1j, complex(-0.0, 1.0), torch.float32, torch.strided,
    torch.device("cpu"), torch.channels_last, range(3), {1}, frozenset(), {torch.float32}, {Colour.RED}, Colour.RED,
    Access.READ, Access.READ | Access.WRITE, (1, (Colour.RED,)), [Colour.RED], {"a": 1}, {"a": Colour.RED},
    {Colour.RED: 1}, slice(1, None), slice(Colour.RED, 2), torch.Size([1]), torch.ops.aten.add.Tensor,
    [torch.ops.aten.add.Tensor], torch.relu, int, torch.ones(1), nn.Linear(1, 1), operator.add,
]  # fmt: skip


def through_torch_fx(value: Any) -> Any:
    graph = torch.fx.Graph()
    graph.output((value,))
    return torch.fx.GraphModule(nn.Module(), graph)()[0]


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("value", VALUES, ids=lambda value: repr(value)[:20])
def test_what_is_said_to_be_written_is_written(value: Any, nested: bool) -> None:
    if not is_written(value, nested=nested):
        return
    found = through_torch_fx({"key": value})["key"] if nested else through_torch_fx(value)
    assert type(found) is type(value)
    assert repr(found) == repr(value)


def test_plain_values_are_written() -> None:
    for value in (1, None, "a", 1.5, [1, (2,)], {"a": [1]}, slice(1), torch.float32, Colour.RED):
        assert is_written(value, nested=False)
    assert is_written({"a": [1]}, nested=True)


@pytest.mark.parametrize(
    "value",
    [torch.ones(1), torch.Size([1]), torch.relu, int, Access.READ | Access.WRITE, [torch.Size([1])], {Colour.RED}],
)
def test_other_values_are_not(value: Any) -> None:
    assert not is_written(value, nested=False)


def test_nodes_are_not_values() -> None:
    node = featx.Graph().placeholder("x")
    for value in (node, [node], {"a": (node,)}, slice(node)):
        assert not is_written(value, nested=False)


def test_last_readers_are_found() -> None:
    graph = featx.Graph()
    x = graph.placeholder("x")
    y = graph.call_method("add", (x, x))
    z = graph.call_method("add", (x, y))
    unread = graph.call_method("neg", (z,))
    output = graph.output([z])
    assert last_readers(graph) == {x: z, y: z, z: output}
    assert unread not in last_readers(graph)


CALLS: list[tuple[str, Any, tuple[Any, ...], bool]] = [
    ("call_function", operator.iadd, ("x", 1), False),
    ("call_function", operator.iadd, ("early", 1), True),
    ("call_function", operator.iadd, ([1], "x"), True),
    ("call_function", operator.iconcat, ([1], [2]), False),
    ("call_function", operator.pow, (-2, "x"), True),
    ("call_function", operator.pow, ("x", -2), False),
    ("call_function", operator.sub, (-2, "x"), False),
    ("call_function", getattr, (1.5, "real"), True),
    ("call_function", getattr, ("x", "real"), False),
    ("call_method", "conjugate", (1,), True),
    ("call_method", "format", ("{}",), False),
    ("call_function", torch.rand, (), False),
]


@pytest.mark.parametrize(("op", "target", "args", "expected"), CALLS)
def test_calls_that_are_misread_are_known(op: str, target: Any, args: tuple[Any, ...], expected: bool) -> None:
    graph = featx.Graph()
    nodes = {"x": graph.placeholder("x"), "early": graph.placeholder("early")}
    node = graph.create_node(op, target, tuple([nodes.get(arg, arg) if type(arg) is str else arg for arg in args]))
    graph.output((node, nodes["early"]))
    assert is_misread(node, last_readers(graph)) is expected
