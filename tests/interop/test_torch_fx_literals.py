"""to_torch_fx: what stands in arguments comes out of torch.fx's code, of its Interpreter, and of the way back."""

from __future__ import annotations

import collections
import enum
import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.fx
from torch import nn

import featx

Point = collections.namedtuple("Point", "x y")
X = torch.tensor([1.0, -2.0])


class Colour(enum.Enum):
    RED = 1
    BLUE = (2, 3)


class Size(enum.IntEnum):
    SMALL = 4


class Access(enum.Flag):
    READ = 1
    WRITE = 2


class Number(float):
    def __repr__(self) -> str:
        return "a number"


class Pair(tuple[Any, ...]):
    __slots__ = ()


def take(*args: Any, **kwargs: Any) -> Any:
    return args, kwargs


def named(x: Any) -> Any:
    return x


LITERALS: dict[str, Any] = {
    "int": 3,
    "bool": True,
    "negative": -1,
    "large": 10**30,
    "float": 0.1,
    "negative zero": -0.0,
    "infinite": math.inf,
    "minus infinite": -math.inf,
    "nan": math.nan,
    "complex": 1.5 - 2.5j,
    "complex zero": complex(-0.0, -0.0),
    "complex nan": complex(math.nan, math.inf),
    "string": 'it\'s "quoted"\n\\ {x}',
    "bytes": b"\x00'",
    "none": None,
    "ellipsis": ...,
    "dtype": torch.bfloat16,
    "device": torch.device("cpu"),
    "device with an index": torch.device("cuda", 1),
    "layout": torch.strided,
    "memory format": torch.channels_last,
    "range": range(1, 9, 2),
    "slice": slice(None, 3, -1),
    "empty tuple": (),
    "tuple of one": (1,),
    "nested": ([1, (2.5, [None])], {"a": {"b": [math.inf]}}),
    "dict with odd keys": {1: 2, None: 3, (1, "a"): 4, torch.float32: 5},
    "named tuple": Point(1, 2.0),
    "named tuple with nan": Point(math.nan, complex(0.0, -0.0)),
    "named tuple in a list": [Point(1, 2)],
    "named tuple in a dict": {"p": Point(1, 2)},
    "named tuple in a named tuple": Point(Point(1, 2), torch.Size([3])),
    "size": torch.Size([1, 2]),
    "size in a list": [torch.Size([1]), 2],
    "tuple of its own class": Pair((1, 2)),
    "enum": Colour.RED,
    "enum in a list": [Colour.BLUE],
    "enum in a dict": {"c": Colour.RED},
    "int enum": Size.SMALL,
    "flags": Access.READ | Access.WRITE,
    "set": {1, 2},
    "empty set": set(),
    "frozen set": frozenset({"a"}),
    "set of dtypes": {torch.float32},
    "set of enums": {Colour.RED},
    "numpy number": numpy.float64(1.5),
    "numpy integer in a dict": {"n": numpy.int64(3)},
    "float of its own class": Number(1.5),
    "function": take,
    "function of torch": torch.relu,
    "operator": torch.ops.aten.add.Tensor,
    "operator in a list": [torch.ops.aten.add.Tensor],
    "operator in a dict": {"f": torch.ops.aten.add.Tensor},
    "class": int,
    "class of torch": nn.Linear,
    "tensor": torch.tensor([[1, 2]]),
    "tensor in a dict": {"t": [torch.tensor(2.5)]},
    "parameter": nn.Parameter(torch.ones(2)),
    "tensor in a named tuple": Point(torch.ones(1), 2),
    "object": collections.Counter,
}


def is_same(one: Any, other: Any) -> bool:
    if isinstance(one, list):  # an Interpreter gives the immutable ones of its graph
        return isinstance(other, list) and is_same(tuple(one), tuple(other))
    if isinstance(one, dict) and isinstance(other, dict):
        return list(one) == list(other) and all(is_same(one[key], other[key]) for key in one)
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(is_same, one, other))
    if isinstance(one, slice):
        return is_same((one.start, one.stop, one.step), (other.start, other.stop, other.step))
    return repr(one) == repr(other) and (one == other or one != one or "nan" in repr(one))


def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> featx.GraphModule:
    """Return a module that computes function(x, *args, **kwargs)."""
    graph = featx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(function, (x, *args), kwargs))
    return featx.GraphModule(nn.Module(), graph)


def results(module: featx.GraphModule, *inputs: Any) -> dict[str, Any]:
    """Return what the conversions of `module` compute."""
    converted = featx.to_torch_fx(module)
    return {
        "code of torch.fx": converted(*inputs),
        "interpreter": torch.fx.Interpreter(converted).run(*inputs),
        "back": featx.from_torch_fx(converted)(*inputs),
    }


@pytest.mark.parametrize("where", ["args", "kwargs", "dict", "slice"])
@pytest.mark.parametrize("name", LITERALS)
def test_literal_arrives_as_what_it_is(name: str, where: str) -> None:
    value = LITERALS[name]
    args: tuple[Any, ...] = {
        "args": (value, [value]), "kwargs": (), "dict": ({"key": (value,)},), "slice": (slice(None, value),)
    }[where]  # fmt: skip
    kwargs = {"key": value} if where == "kwargs" else {}
    for how, found in results(call(take, *args, **kwargs), X).items():
        assert is_same(found, take(X, *args, **kwargs)), how


@pytest.mark.parametrize("name", LITERALS)
def test_graph_comes_back_with_the_same_literal(name: str) -> None:
    value = LITERALS[name]
    module = call(take, value, key=[value])
    back = featx.from_torch_fx(featx.to_torch_fx(module))
    for before, after in zip(module.graph.nodes, back.graph.nodes, strict=True):
        assert (before.op, before.name, before.target) == (after.op, after.name, after.target)
        if before.target is take:
            assert is_same(before.args[1:], after.args[1:])
            assert is_same(before.kwargs, after.kwargs)
    assert back.code == module.code


def test_nodes_stand_inside_every_container() -> None:
    graph = featx.Graph()
    x = graph.placeholder("x")
    y = graph.call_method("neg", (x,))
    inside = ([x, (y,)], {"a": {"b": y}}, slice(x, y, 2), Point(x, [y]), [Point(y, {"c": x})])
    inside += (Point(Point(x, 1), torch.Size([2])), {"p": Point(y, Colour.RED)}, Pair((x, [y])), {"q": [Pair((1, x))]})
    graph.output(graph.call_function(take, inside, {"k": {"d": (x, slice(None, y))}}))
    module = featx.GraphModule(nn.Module(), graph)
    expected = module(X)
    for how, found in results(module, X).items():
        assert is_same(found, expected), how


def test_one_tensor_in_two_places_is_one_buffer() -> None:
    tensor = torch.tensor([1.0, 2.0])
    graph = featx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(torch.add, (x, tensor))
    graph.output(graph.call_function(torch.mul, (y, tensor)))
    module = featx.GraphModule(nn.Module(), graph)
    converted = featx.to_torch_fx(module)
    assert [node.target for node in converted.graph.find_nodes(op="get_attr")] == ["_tensor_constant0"]
    assert converted._tensor_constant0 is tensor
    assert list(converted.state_dict()) == []
    assert torch.equal(converted(X), (X + tensor) * tensor)


def test_tensor_that_moved_with_the_module_is_taken_where_it_is_now() -> None:
    module = call(torch.add, torch.tensor([1.0, 2.0])).to("meta")
    converted = featx.to_torch_fx(module)
    assert converted._tensor_constant0.is_meta
    assert featx.from_torch_fx(converted)(X.to("meta")).is_meta


def test_tensor_that_was_put_into_the_graph_later_is_there_too() -> None:
    module = call(torch.add, torch.tensor([1.0, 2.0]))
    other = torch.tensor([5.0, 6.0])
    node = module.graph.find_nodes(op="call_function", target=torch.add)[0]
    node.args = (node.args[0], other)
    assert torch.equal(featx.to_torch_fx(module)(X), X + other)


def test_helper_nodes_take_no_name_of_another_node() -> None:
    graph = featx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(torch.add, (x, torch.ones(2)))
    named_alike = graph.call_method("neg", (y,))
    named_alike.name = "_tensor_constant0"
    graph.output(named_alike)
    module = featx.GraphModule(nn.Module(), graph)
    converted = featx.to_torch_fx(module)
    names = [node.name for node in converted.graph.nodes]
    assert names == ["x", "_tensor_constant0_1", "add", "_tensor_constant0", "output"]
    converted.graph.lint()
    assert torch.equal(converted(X), -(X + 1))
    assert [node.name for node in featx.from_torch_fx(converted).graph.nodes] == [n.name for n in graph.nodes]


def test_attribute_of_the_model_with_the_name_of_a_constant_stays() -> None:
    model = nn.Module()
    model.register_buffer("_constant0", torch.tensor([10.0, 20.0]))
    graph = featx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(take, (x, graph.get_attr("_constant0"), torch.Size([2]))))
    module = featx.GraphModule(model, graph)
    for how, found in results(module, X).items():
        assert is_same(found, ((X, model._constant0, torch.Size([2])), {})), how


# -- calls that torch.fx writes as something else ----------------------------------------------------------------------


def test_number_that_is_added_to_in_place_keeps_its_value_for_later_readers() -> None:
    graph = featx.Graph()
    x = graph.placeholder("x")
    length = graph.call_function(len, (x,))
    longer = graph.call_function(operator.iadd, (length, 1))
    graph.output(graph.call_function(take, (length, longer)))
    module = featx.GraphModule(nn.Module(), graph)
    for how, found in results(module, X).items():
        assert found == ((2, 3), {}), how
    # What torch.fx makes of it otherwise.
    plain = torch.fx.Graph()
    x, length = plain.placeholder("x"), None
    length = plain.call_function(len, (x,))
    plain.output((length, plain.call_function(operator.iadd, (length, 1)), length))
    assert torch.fx.GraphModule(nn.Module(), plain)(X) == (3, 3, 3)


def test_tensor_that_is_added_to_in_place_is_written() -> None:
    graph = featx.Graph()
    x = graph.placeholder("x")
    y = graph.call_method("clone", (x,))
    z = graph.call_function(operator.iadd, (y, 1))
    graph.output(graph.call_function(take, (y, z)))
    module = featx.GraphModule(nn.Module(), graph)
    for how, found in results(module, X).items():
        assert is_same(found, ((X + 1, X + 1), {})), how


def test_sum_in_place_is_left_alone_where_nobody_reads_the_old_name() -> None:
    graph = featx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(operator.iadd, (graph.call_method("clone", (x,)), 1)))
    converted = featx.to_torch_fx(featx.GraphModule(nn.Module(), graph))
    assert [node.name for node in converted.graph.nodes] == ["x", "clone", "iadd", "output"]


@pytest.mark.parametrize("function", [operator.imul, operator.imatmul, operator.ior, operator.ipow, operator.isub])
def test_literal_on_the_left_of_an_assigning_operator(function: Callable[..., Any]) -> None:
    graph = featx.Graph()
    x = graph.placeholder("x")
    left = graph.call_function(function, (3, 2)) if function is not operator.imatmul else None
    left = left or graph.call_function(function, (torch.ones(2), x))
    graph.output(left)
    module = featx.GraphModule(nn.Module(), graph)
    expected = module(X)
    for how, found in results(module, X).items():
        assert is_same(found, expected), how


@pytest.mark.parametrize("left", [-2.0, -2, 2, -math.inf, True, -2 + 1j])
def test_power_of_a_literal(left: Any) -> None:
    graph = featx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(operator.pow, (left, graph.call_function(len, (x,)))))
    module = featx.GraphModule(nn.Module(), graph)
    for how, found in results(module, X).items():
        assert found == left**2, how


@pytest.mark.parametrize("owner", [-2.5, 3, -3, True, math.nan, -math.inf, 1 - 2j])
def test_method_and_attribute_of_a_literal(owner: Any) -> None:
    graph = featx.Graph()
    graph.placeholder("x")
    real = graph.call_function(getattr, (owner, "real"))
    conjugate = graph.call_method("conjugate", (owner,))
    graph.output((real, conjugate))
    module = featx.GraphModule(nn.Module(), graph)
    for how, found in results(module, X).items():
        assert is_same(found, (owner.real, owner.conjugate())), how


@pytest.mark.parametrize("owner", ["a {}", [1, 2], (1,), {"a": 1}, b"ab", Colour.RED, torch.float32, torch.ones(2)])
def test_attribute_of_another_literal(owner: Any) -> None:
    graph = featx.Graph()
    graph.placeholder("x")
    graph.output(graph.call_function(getattr, (owner, "__class__")))
    module = featx.GraphModule(nn.Module(), graph)
    for how, found in results(module, X).items():
        assert issubclass(found, type(owner)), how  # an Interpreter has the immutable ones of its graph


OPERATORS = [
    operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod, operator.lt,
    operator.eq, operator.and_, operator.or_, operator.xor, operator.lshift, operator.neg, operator.pos,
    operator.invert, operator.not_, operator.truth, operator.iadd, operator.imul, operator.ixor, operator.concat,
]  # fmt: skip


@pytest.mark.parametrize("function", OPERATORS, ids=lambda function: function.__name__)
def test_operator_on_negative_literals(function: Any) -> None:
    graph = featx.Graph()
    graph.placeholder("x")
    arguments = ([1], [2]) if function is operator.concat else (-7, 3)
    if function in (operator.neg, operator.pos, operator.invert, operator.not_, operator.truth):
        arguments = arguments[:1]
    graph.output(graph.call_function(function, arguments))
    module = featx.GraphModule(nn.Module(), graph)
    for how, found in results(module, X).items():
        assert is_same(found, function(*arguments)), how


def test_item_is_written() -> None:
    graph = featx.Graph()
    x = graph.call_method("clone", (graph.placeholder("x"),))
    graph.call_function(operator.setitem, (x, 0, 5.0))
    graph.output(x)
    module = featx.GraphModule(nn.Module(), graph)
    for how, found in results(module, X).items():
        assert torch.equal(found, torch.tensor([5.0, -2.0])), how


HOLDS_ANY = pytest.mark.skipif(
    torch.__version__.startswith("2.12."), reason="torch.fx of torch 2.12 holds no method of an object in C"
)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 7 * gradient


def misnamed(x: Any) -> Any:
    """Claims to be another function of torch."""
    return x + 1


misnamed.__module__, misnamed.__name__ = "torch", "relu"


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
@pytest.mark.parametrize(
    "kind", ["autograd", "partial", "scripted", "misnamed", pytest.param("method", marks=HOLDS_ANY)]
)
def test_function_that_has_no_name_of_its_own_is_called(kind: str) -> None:
    functions: dict[str, Callable[[], Any]] = {
        "autograd": lambda: Double.apply,
        "partial": lambda: functools.partial(torch.add, 1),
        "scripted": lambda: torch.jit.script(named),
        "misnamed": lambda: misnamed,
        "method": lambda: torch.Generator().manual_seed,
    }
    function = functions[kind]()
    graph = featx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(function, (x if kind != "method" else 3,)))
    module = featx.GraphModule(nn.Module(), graph)
    expected = function(X) if kind != "method" else function(3)
    for how, found in results(module, X).items():
        assert found is expected if kind == "method" else is_same(found, expected), how
    back = featx.from_torch_fx(featx.to_torch_fx(module))
    assert back.graph.output_node().args[0].target is graph.output_node().args[0].target
    converted = featx.to_torch_fx(module)
    again = torch.fx.symbolic_trace(converted)
    assert kind == "method" or [node.op for node in again.graph.nodes] == [node.op for node in converted.graph.nodes]


def test_gradient_of_an_autograd_function_is_its_own() -> None:
    x = X.clone().requires_grad_()
    featx.to_torch_fx(call(Double.apply))(x).sum().backward()
    assert torch.equal(x.grad, torch.full_like(X, 7.0))


# -- what cannot be carried over ---------------------------------------------------------------------------------------


def test_value_of_an_item_write_is_refused_both_ways() -> None:
    graph, theirs = featx.Graph(), torch.fx.Graph()
    for one in (graph, theirs):
        one.output(one.call_function(operator.setitem, (one.placeholder("x"), 0, 5.0)))
    with pytest.raises(featx.GraphError, match="'setitem' writes an item and is read by 'output'"):
        featx.to_torch_fx(featx.GraphModule(nn.Module(), graph))
    with pytest.raises(featx.GraphError, match="'setitem' writes an item"):
        featx.from_torch_fx(torch.fx.GraphModule(nn.Module(), theirs))


@pytest.mark.parametrize("key", [Colour.RED, Number(1.0), Point(1, 2)])
def test_key_that_torch_fx_cannot_write_is_refused(key: Any) -> None:
    with pytest.raises(featx.ArgumentTypeError, match=r"cannot hold node 'take': a dict has the key"):
        featx.to_torch_fx(call(take, {key: 1}))


def test_keyword_that_is_a_keyword_of_python_is_refused() -> None:
    with pytest.raises(featx.ArgumentTypeError, match="node 'take': its code cannot pass the keyword 'class'"):
        featx.to_torch_fx(call(take, **{"class": 1}))


def test_tensor_in_a_bare_graph_is_refused() -> None:
    with pytest.raises(featx.ArgumentTypeError, match=r"node 'take'.* is a Tensor.*convert the GraphModule"):
        featx.to_torch_fx(call(take, torch.ones(2)).graph)


def test_module_as_an_argument_is_refused() -> None:
    graph = featx.Graph()
    graph.output(graph.call_function(take, (graph.placeholder("x"), nn.Linear(1, 1))))
    with pytest.raises(featx.ArgumentTypeError, match=r"is a Linear.*graph.get_attr"):
        featx.to_torch_fx(graph)
