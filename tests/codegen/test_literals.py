from __future__ import annotations

import collections
import enum
import functools
import math
import operator
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from featx import Graph, GraphModule
from featx.codegen.literals import function_name, literal
from featx.errors import ArgumentTypeError
from tests.hostile import PAYLOAD, nothing_runs
from tests.ids import without_address

INF, NAN = math.inf, math.nan


class Point(NamedTuple):
    x: Any
    y: Any = 0


Plain = collections.namedtuple("Plain", [])


class Colour(enum.Enum):
    RED = "r"
    ALSO_RED = "r"


class Level(enum.IntEnum):
    LOW = 1


class Mode(enum.Flag):
    READ = 1
    WRITE = 2


class Bits(enum.IntFlag):
    ONE = 1
    TWO = 2


class Text(str):
    """A string with a class of its own, as tokenizers have."""


class Marker:
    """An object that no code can express."""


class Loud:
    """What prints as code, in each way in which Python turns a value into text or into a number."""

    def __repr__(self) -> str:
        return PAYLOAD

    def __index__(self) -> int:
        return 99

    __str__ = __repr__
    __int__ = __index__

    def __format__(self, spec: str) -> str:
        return PAYLOAD


LOUD = [
    type("LoudValue", (Loud, kind), {})(value)
    for kind, value in [(int, 5), (float, 2.5), (bytes, b"x"), (complex, 1j), (str, "s"), (tuple, (1,)), (list, [1]),
                        (dict, {"a": 1}), (set, {1}), (frozenset, {1})]
]  # fmt: skip


def own_function(x: int) -> int:
    return x + 1


VALUES: list[Any] = [
    0, 1, -1, 10**30, True, False, None, ..., 0.0, -0.0, 1.5, -2.5e-300, 1e22, INF, -INF, NAN, "text",
    "it's \"quoted\"\n\\", "ünï☃", b"\x00raw", 1j, complex(-0.0, 2.0), complex(0.0, -0.0), complex(-0.0, -0.0),
    complex(INF, NAN), complex(1.5, -INF), (), (1,), (1, (2, [3])), [], [[], ()], {},
    {"k": {1: (2,)}, None: -INF, (1, 2): ...}, set(), {1, 2}, frozenset(), frozenset({(1, NAN)}), slice(None),
    slice(1, -2, None), slice(None, None, -1), range(3), range(5, 0, -2), torch.float32, torch.bfloat16,
    torch.complex64, torch.bool, torch.device("cpu"), torch.device("cuda", 1), torch.device("meta"),
    torch.contiguous_format, torch.channels_last, torch.preserve_format, torch.strided, torch.sparse_coo,
    torch.per_tensor_affine, torch.Size([]), torch.Size([1, 2]), Point(1, [2]), Point(Point(0)), Plain(), Colour.RED,
    Level.LOW, Mode.READ, Mode.READ | Mode.WRITE, Mode(0), Bits.ONE | Bits.TWO, Bits(8), Text("t"), int, torch.Tensor,
    nn.Linear, Point, Marker, Marker(), torch.relu, functional.gelu, functional.max_pool2d, operator.add, math.sqrt,
    len, own_function, functools.partial(own_function, 1), torch.ops.aten.add.Tensor, torch.ops.aten.add,
    torch.Tensor.add, torch.finfo(torch.float16), np.float32(1.5), np.int64(3), np.float64(2.5), lambda x: x,
    Point._make,
]  # fmt: skip


def round_trip(value: Any) -> Any:
    """Return what generated code makes of `value`."""
    graph = Graph()
    graph.output((value,))
    return GraphModule(nn.Module(), graph)()[0]


def same(one: Any, other: Any) -> bool:
    """Say whether two values are alike to the bit and to the class."""
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        return struct.pack("d", one) == struct.pack("d", other)
    if isinstance(one, complex):
        return same(one.real, other.real) and same(one.imag, other.imag)
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return same(list(one.items()), list(other.items()))
    if isinstance(one, slice):
        return same((one.start, one.stop, one.step), (other.start, other.stop, other.step))
    if isinstance(one, (set, frozenset)):
        return repr(one) == repr(other)
    return bool(one is other or one == other)


@pytest.mark.parametrize("value", VALUES, ids=without_address)
def test_code_evaluates_to_the_value_it_was_written_for(value: Any) -> None:
    result = round_trip(value)
    expected = {Text: str}.get(type(value), lambda kept: kept)(value)
    assert same(result, expected), f"{result!r} is not {value!r}"


@pytest.mark.parametrize("value", VALUES, ids=without_address)
def test_value_inside_containers_survives(value: Any) -> None:
    expected = {Text: str}.get(type(value), lambda kept: kept)(value)
    assert same(round_trip(([value, (value,)], Point({"k": value}))), ([expected, (expected,)], Point({"k": expected})))


@pytest.mark.parametrize("value", [member for member in VALUES if callable(member) or isinstance(member, enum.Enum)])
def test_functions_classes_and_members_are_the_same_object(value: Any) -> None:
    assert round_trip(value) is value or round_trip(value) == value


def test_tensor_is_kept_by_the_module_and_is_the_same_object() -> None:
    tensor = torch.ones(2)
    assert round_trip({"k": [tensor]})["k"][0] is tensor


def test_parameter_stays_a_parameter() -> None:
    parameter = nn.Parameter(torch.ones(2))
    graph = Graph()
    graph.output(parameter)
    module = GraphModule(nn.Module(), graph)
    assert module() is parameter
    assert list(module.parameters()) == [parameter]


def test_return_type_of_torch_keeps_its_class() -> None:
    result = torch.ones(2, 2).max(dim=0)
    emitted = round_trip(result)
    assert type(emitted) is type(result)
    assert emitted.values is result.values


def test_list_and_dict_in_arguments_come_out_plain() -> None:
    assert [type(item) for item in round_trip(([1], {"k": 1}))] == [list, dict]


class NoScope:
    def name_of_node(self, node: Any) -> str:
        raise AssertionError

    def name_of_global(self, hint: str, value: object) -> str:
        return f"<{hint}>"

    def name_of_builtin(self, name: str) -> str:
        return name

    def name_of_tensor(self, tensor: torch.Tensor) -> str:
        return "self.tensor"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (-INF, "-inf"),
        (NAN, "nan"),
        (complex(-0.0, 1), "complex(-0.0, 1.0)"),
        (..., "..."),
        ((1,), "(1,)"),
        (slice(None, 2), "slice(None, 2, None)"),
        (torch.float16, "torch.float16"),
        (torch.device("cuda:1"), "torch.device('cuda:1')"),
        (torch.channels_last, "torch.channels_last"),
        (torch.Size([2]), "torch.Size((2,))"),
        ({"k": [None]}, "{'k': [None]}"),
        (frozenset(), "frozenset(set())"),
        (torch.ones(1), "self.tensor"),
        (torch.relu, "torch.relu"),
        (functional.gelu, "torch._C._nn.gelu"),
        (math.sqrt, "<math.sqrt>"),
        (len, "len"),
        (nn.ReLU, "torch.nn.modules.activation.ReLU"),
        (Marker(), "<_marker>"),
    ],
)
def test_literal_reads_as_a_person_would_write_it(value: Any, text: str) -> None:
    assert literal(value, NoScope()) == text


@pytest.mark.parametrize(
    "function",
    [
        torch.relu,
        functional.relu,
        functional.max_pool2d,
        torch.ops.aten.add.Tensor,
        torch.fft.fft,
        torch.Tensor.view,
        getattr,
    ],
)
def test_name_of_a_torch_function_evaluates_to_it(function: Callable[..., Any]) -> None:
    assert eval(function_name(function, NoScope()), {"torch": torch}) is function


def test_module_as_an_argument_is_refused_with_the_way_out() -> None:
    graph = Graph()
    graph.output(nn.ReLU())
    with pytest.raises(ArgumentTypeError, match=r"a ReLU module is an argument .*read it with graph.get_attr\(path\)"):
        GraphModule(nn.Module(), graph)


INFIX = [
    operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod, operator.pow,
    operator.eq, operator.ne, operator.lt, operator.gt, operator.le, operator.ge, operator.lshift, operator.rshift,
    operator.and_, operator.or_, operator.xor,
]  # fmt: skip


@pytest.mark.parametrize("function", INFIX, ids=lambda function: function.__name__)
@pytest.mark.parametrize("kind", ["both literal", "left literal", "right literal"])
def test_operators_bind_as_calls_do_also_between_negative_numbers(function: Any, kind: str) -> None:
    for left, right in [(-2, 2), (-3, -2), (2, -3), (5, 3), (-2.5, 2), (-INF, 2), (True, -1), (-7, 2)]:
        graph = Graph()
        x, y = graph.placeholder("x"), graph.placeholder("y")
        node = graph.call_function(
            function, (x if kind == "right literal" else left, y if kind == "left literal" else right)
        )
        graph.output(graph.call_function(operator.neg, (graph.call_function(operator.pos, (node,)),)))
        try:
            expected = -function(left, right)
        except (TypeError, ValueError):
            continue
        assert same(GraphModule(nn.Module(), graph)(left, right), expected)


@pytest.mark.parametrize("function", [operator.neg, operator.pos, operator.invert])
@pytest.mark.parametrize("value", [-3, 2, 0])
def test_prefix_operators_apply_to_negative_literals(function: Any, value: int) -> None:
    graph = Graph()
    graph.output(graph.call_function(function, (value,)))
    assert GraphModule(nn.Module(), graph)() == function(value)


@pytest.mark.parametrize("value", LOUD, ids=lambda value: type(value).__mro__[2].__name__)
def test_value_that_prints_as_code_is_written_as_what_it_is(value: Any) -> None:
    with nothing_runs():
        assert round_trip([value, (value,), {"k": value}, slice(value)]) == [
            value,
            (value,),
            {"k": value},
            slice(value),
        ]


@pytest.mark.parametrize("value", [10**5000, -(10**5000)], ids=["positive", "negative"])
def test_number_of_more_digits_than_python_writes_is_the_same(value: int) -> None:
    assert round_trip({"k": value})["k"] == value


def test_item_of_a_number_is_an_error_of_the_call() -> None:
    graph = Graph()
    graph.call_function(operator.setitem, (-1, 0, 1))
    with pytest.raises(TypeError, match="does not support item assignment"):
        GraphModule(nn.Module(), graph)()
