"""Proxy: what is done with a traced value becomes nodes, and what cannot be recorded is refused."""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.fx
from torch import nn
from torch.nn import functional

import featx

Rows = Callable[[Any], list[str]]
X = torch.tensor([[1.0, 2.0], [3.0, 4.0]])


def assert_equal_to_eager(function: Callable[..., Any], *inputs: torch.Tensor) -> featx.GraphModule:
    """Trace `function`, and compare results and what happened to the inputs with a plain call."""
    traced = featx.symbolic_trace(function)
    ours, theirs = [x.clone() for x in inputs], [x.clone() for x in inputs]
    result, expected = traced(*ours), function(*theirs)
    assert type(result) is type(expected)
    torch.testing.assert_close(result, expected, rtol=0, atol=0)
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine, other)
    return traced


OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "add": lambda x: x + 1,
    "radd": lambda x: 1 + x,
    "sub": lambda x: x - 1,
    "rsub": lambda x: 1 - x,
    "mul": lambda x: x * 3,
    "rmul": lambda x: 3 * x,
    "truediv": lambda x: x / 3,
    "rtruediv": lambda x: 3 / x,
    "floordiv": lambda x: x // 2,
    "rfloordiv": lambda x: 7 // x,
    "mod": lambda x: x % 2,
    "rmod": lambda x: 7 % x,
    "pow": lambda x: x**2,
    "rpow": lambda x: 2**x,
    "matmul": lambda x: x @ x,
    "shift": lambda x: (x.int() << 2) >> 1,
    "logic": lambda x: (x > 1) & (x < 4) | ~(x == 2) ^ (x >= 3),
    "compare": lambda x: (x != 1, x <= 2),
    "unary": lambda x: abs(-x) + (+x),
    "chained": lambda x: -(x + 1) * 2,
    "index": lambda x: x[0, :, None],
    "ellipsis": lambda x: x[..., -1:],
    "mask": lambda x: x[x > 2],
    "list index": lambda x: x[[1, 0]],
    "dynamic slice": lambda x: x[: x.shape[0] - 1],
    "attribute": lambda x: x.T,
    "attribute of attribute": lambda x: x.T.shape,
    "method": lambda x: x.transpose(0, 1).clamp(min=2.0),
    "size": lambda x: x.view(x.size(0) * x.size(1)),
    "divmod": lambda x: divmod(x.shape[0] + 5, 3),
    "reflected divmod": lambda x: divmod(11, x.shape[0] + 1),
    "round": lambda x: round(x.shape[0] / 3),
    "round to digits": lambda x: round(x.shape[0] / 3, 2),
    "ceil and floor": lambda x: (math.ceil(x.shape[0] / 3), math.floor(x.shape[0] / 3), math.trunc(x.shape[0] / 3)),
    "keyword": lambda x: torch.add(input=x, other=x, alpha=2),
    "nested arguments": lambda x: torch.cat([x, torch.stack((x, x))[0]], dim=0),
    "functional": lambda x: functional.softmax(functional.gelu(x), dim=-1),
    "torch.nn.init is not needed": lambda x: torch.where(x > 2, x, 0.0),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operation_gives_what_eager_gives(name: str) -> None:
    assert_equal_to_eager(OPERATIONS[name], X)


# torch.fx refuses these.
ONLY_HERE = {"divmod", "reflected divmod", "round", "round to digits"}


@pytest.mark.parametrize("name", [name for name in OPERATIONS if name not in ONLY_HERE])
def test_operation_is_recorded_as_torch_fx_records_it(name: str, rows: Rows) -> None:
    assert rows(featx.symbolic_trace(OPERATIONS[name]).graph) == rows(torch.fx.symbolic_trace(OPERATIONS[name]).graph)


@pytest.mark.parametrize("function", [math.ceil, math.floor, math.trunc])
def test_rounding_is_recorded_even_where_math_is_not_wrapped(function: Callable[[Any], Any]) -> None:
    graph = featx.Tracer(autowrap_modules=()).trace(lambda x: function(x.shape[0] / 3))
    assert featx.GraphModule(nn.Module(), graph)(X) == function(2 / 3)


IN_PLACE: list[Callable[..., Any]] = [
    operator.iadd,
    operator.isub,
    operator.imul,
    operator.itruediv,
    operator.ifloordiv,
    operator.imod,
    operator.ipow,
]


@pytest.mark.parametrize("operation", IN_PLACE)
def test_in_place_operator_writes_into_every_alias(operation: Callable[..., Any]) -> None:
    def aliased(x: Any) -> Any:
        alias = x
        operation(x, 2)
        return alias

    assert_equal_to_eager(aliased, X)


def test_alias_sees_an_augmented_assignment() -> None:
    def aliased(x: Any) -> Any:
        y = x
        x += 1
        return y

    assert_equal_to_eager(aliased, X)


def test_view_sees_an_augmented_assignment() -> None:
    def viewed(x: Any) -> Any:
        row = x[0]
        x *= 3
        return row + 0

    assert_equal_to_eager(viewed, X)


def test_augmented_assignment_of_a_size_makes_a_new_number() -> None:
    def sizes(x: Any) -> Any:
        height = x.shape[0]
        twice = height
        twice *= 2
        return x.new_zeros(height, twice)

    assert_equal_to_eager(sizes, X)


def test_augmented_assignment_is_named_like_the_operator() -> None:
    def augmented(x: Any) -> Any:
        x += 1
        x -= 2
        return x

    assert [node.name for node in featx.symbolic_trace(augmented).graph.nodes] == ["x", "add", "sub", "output"]


def test_item_assignment_is_recorded() -> None:
    def assign(x: Any) -> Any:
        x[0] = 1
        x[:, 1] += 5
        x[x > 5] = 0
        return x

    assert_equal_to_eager(assign, X)


def test_in_place_methods_and_out_arguments_are_recorded() -> None:
    def write(x: Any, y: Any) -> Any:
        alias = x
        x.add_(1).mul_(2)
        torch.add(y, 1, out=x)
        functional.relu(y, inplace=True)
        return alias + y

    assert_equal_to_eager(write, X, -X)


def test_attribute_that_is_set_on_a_traced_value_is_recorded_or_refused() -> None:
    def function(x: Any) -> Any:
        x = x + 0
        x.data = x.data * 2
        return x

    try:
        traced = featx.symbolic_trace(function)
    except featx.TraceError:
        return
    assert torch.equal(traced(X), X * 2)


def test_shape_is_unpacked_into_its_items(rows: Rows) -> None:
    def unpack(x: Any) -> Any:
        height, width = x.shape
        return x.reshape(width, height)

    traced = assert_equal_to_eager(unpack, X)
    assert rows(traced.graph) == rows(torch.fx.symbolic_trace(unpack).graph)


def test_tuple_result_is_unpacked_and_indexed() -> None:
    def unpack(x: Any) -> Any:
        values, indices = x.max(1)
        (first, second), third = torch.split(x, 1), x.min(0).values
        return values + indices + first + second + third

    assert_equal_to_eager(unpack, X)


def test_attribute_that_is_only_called_makes_no_getattr_node() -> None:
    graph = featx.symbolic_trace(lambda x: x.relu().shape).graph
    assert [(node.op, node.name) for node in graph.nodes] == [
        ("placeholder", "x"),
        ("call_method", "relu"),
        ("call_function", "getattr_1"),
        ("output", "output"),
    ]


def test_attribute_that_is_used_twice_makes_one_node() -> None:
    def twice(x: Any) -> Any:
        shape = x.shape
        return x.new_zeros(shape) + x.new_ones(shape)

    graph = featx.symbolic_trace(twice).graph
    assert len(graph.find_nodes(op="call_function", target=getattr)) == 1


def test_proxy_prints_the_name_of_its_node() -> None:
    graph = featx.Graph()
    assert repr(featx.Proxy(graph.placeholder("x"))) == "Proxy(x)"


def test_proxy_is_hashable_and_equal_by_identity_only_in_python() -> None:
    graph = featx.Graph()
    x = featx.Proxy(graph.placeholder("x"))
    assert {x: 1}[x] == 1
    assert isinstance(hash(x), int)


def test_proxy_of_a_node_appends_to_its_graph() -> None:
    graph = featx.Graph()
    x = featx.Proxy(graph.placeholder("x"))
    y = torch.relu(x + 1).sum(dim=0)  # type: ignore[arg-type]
    graph.output(y.node)
    graph.lint()
    assert torch.equal(featx.GraphModule(nn.Module(), graph)(X), torch.relu(X + 1).sum(dim=0))


def test_new_nodes_of_a_proxy_go_to_the_insert_point() -> None:
    graph = featx.symbolic_trace(lambda x: torch.neg(x)).graph
    x, neg, _ = graph.nodes
    with graph.inserting_before(neg):
        doubled = featx.Proxy(x) * 2
    neg.args = (doubled.node,)
    graph.lint()
    assert torch.equal(featx.GraphModule(nn.Module(), graph)(X), -(X * 2))


def test_deep_copy_of_a_proxy_stands_for_the_same_node() -> None:
    def copied(x: Any) -> Any:
        return copy.deepcopy([x + 1])[0] * 2

    assert_equal_to_eager(copied, X)


def test_proxy_has_no_protocol_that_its_class_lacks() -> None:
    x = featx.Proxy(featx.Graph().placeholder("x"))
    for name in ("__array__", "__array_interface__", "__dataclass_fields__", "__cuda_array_interface__"):
        assert not hasattr(x, name)


def test_call_of_a_value_is_recorded_as_a_method() -> None:
    def call(function: Any, x: Any) -> Any:
        return function(x, 2)

    assert torch.equal(featx.symbolic_trace(call)(torch.mul, X), X * 2)


def test_numpy_float_is_an_operand_like_a_float() -> None:
    assert_equal_to_eager(lambda x: x * np.linspace(0.0, 1.0, 3)[1], X)


def test_parameter_proxy_answers_shape_questions() -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.ones(2, 3))
    graph = featx.Graph()
    tracer = featx.GraphAppendingTracer(graph)
    proxy = featx.ParameterProxy(tracer, graph.get_attr("weight"), "weight", model.weight)
    assert repr(proxy) == "ParameterProxy(weight)"
    assert (proxy.shape, proxy.size(), proxy.size(1)) == ((2, 3), (2, 3), 3)
    assert (proxy.dim(), proxy.ndim, proxy.numel(), proxy.nelement()) == (2, 2, 6, 6)
    assert len(graph.nodes) == 1
