"""TracerBase: values that code passes become arguments of nodes, and GraphAppendingTracer appends to a graph."""

from __future__ import annotations

import dataclasses
import enum
from collections import OrderedDict, namedtuple
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import featx
from tests.ids import without_address

Pair = namedtuple("Pair", ["left", "right"])


class Colour(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Box:
    value: Any
    scale: float = 2.0


def use(*args: Any, **kwargs: Any) -> Any:
    """Stand for a function that takes anything."""
    raise NotImplementedError


@pytest.fixture
def tracer() -> featx.GraphAppendingTracer:
    return featx.GraphAppendingTracer(featx.Graph())


@pytest.fixture
def x(tracer: featx.GraphAppendingTracer) -> featx.Proxy:
    return featx.Proxy(tracer.graph.placeholder("x"), tracer)


LITERALS = [
    1,
    1.5,
    True,
    "text",
    1j,
    b"bytes",
    None,
    ...,
    range(3),
    torch.float16,
    torch.device("cpu"),
    torch.strided,
    torch.channels_last,
    Colour.RED,
    torch.Size([1, 2]),
    use,
    int,
]


@pytest.mark.parametrize("value", LITERALS, ids=without_address)
def test_literal_stands_in_the_graph_as_it_is(tracer: featx.GraphAppendingTracer, value: Any) -> None:
    assert tracer.create_arg(value) == value
    assert type(tracer.create_arg(value)) is type(value)


def test_proxies_become_nodes_at_any_depth(tracer: featx.GraphAppendingTracer, x: featx.Proxy) -> None:
    argument = tracer.create_arg([(x, 1), {"key": [x]}, slice(x, None, 2)])
    assert argument == [(x.node, 1), {"key": [x.node]}, slice(x.node, None, 2)]


def test_named_tuple_keeps_its_class(tracer: featx.GraphAppendingTracer, x: featx.Proxy) -> None:
    argument = tracer.create_arg(Pair(x, [1]))
    assert type(argument) is Pair
    assert argument == Pair(x.node, [1])


def test_dict_of_another_class_is_built_by_its_class_when_the_code_runs() -> None:
    def function(x: Any) -> Any:
        return OrderedDict(a=x, b=x + 1)

    result = featx.symbolic_trace(function)(torch.ones(2))
    assert type(result) is OrderedDict
    assert list(result) == ["a", "b"]
    assert torch.equal(result["b"], torch.full((2,), 2.0))


def test_dataclass_is_built_by_its_class_when_the_code_runs() -> None:
    result = featx.symbolic_trace(lambda x: Box(x + 1, 3.0))(torch.ones(2))
    assert type(result) is Box
    assert torch.equal(result.value, torch.full((2,), 2.0))
    assert result.scale == 3.0


def test_list_argument_is_copied_and_not_shared(tracer: featx.GraphAppendingTracer, x: featx.Proxy) -> None:
    items = [x]
    node = tracer.create_proxy("call_function", use, (items,), {}).node
    items.append(x)
    assert node.args == ([x.node],)


def test_object_may_say_itself_what_it_is_in_a_graph() -> None:
    class Offset:
        def __init__(self, value: Any) -> None:
            self.value = value

        def __fx_create_arg__(self, tracer: featx.TracerBase) -> Any:
            return tracer.create_arg((self.value, 1))

    graph = featx.Graph()
    tracer = featx.GraphAppendingTracer(graph)
    x = featx.Proxy(graph.placeholder("x"), tracer)
    assert tracer.create_arg(Offset(x)) == (x.node, 1)


def test_value_that_no_graph_can_hold_is_refused_with_a_way_out(tracer: featx.GraphAppendingTracer) -> None:
    with pytest.raises(featx.ArgumentTypeError, match=r"type object.*leaf"):
        tracer.create_arg(object())


def test_value_that_no_graph_can_hold_is_a_type_error_for_others(tracer: featx.GraphAppendingTracer) -> None:
    with pytest.raises(TypeError):
        tracer.create_arg({"key": [object()]})


def test_traced_value_as_a_dictionary_key_is_refused(tracer: featx.GraphAppendingTracer, x: featx.Proxy) -> None:
    with pytest.raises(featx.ControlFlowError, match="key of a dictionary"):
        tracer.create_arg({x: 1})


def test_create_proxy_records_one_node_and_answers_with_its_proxy(
    tracer: featx.GraphAppendingTracer, x: featx.Proxy
) -> None:
    proxy = tracer.create_proxy(
        "call_function", functional.relu, (x,), {"inplace": True}, name="active", type_expr=torch.Tensor
    )
    assert type(proxy) is featx.Proxy
    node = proxy.node
    assert (node.op, node.name, node.target, node.type) == ("call_function", "active", functional.relu, torch.Tensor)
    assert (node.args, node.kwargs) == ((x.node,), {"inplace": True})
    assert list(tracer.graph.nodes) == [x.node, node]


def test_proxy_factory_makes_the_proxy(tracer: featx.GraphAppendingTracer, x: featx.Proxy) -> None:
    class Own(featx.Proxy):
        pass

    proxy = tracer.create_proxy(
        "call_function", functional.relu, (x,), {}, proxy_factory_fn=lambda node: Own(node, tracer)
    )
    assert type(proxy) is Own


def test_subclass_may_choose_the_class_of_all_proxies() -> None:
    class Own(featx.Proxy):
        def doubled(self) -> Any:
            return self * 2

    class OwnTracer(featx.GraphAppendingTracer):
        def proxy(self, node: featx.Node) -> featx.Proxy:
            return Own(node, self)

    graph = featx.Graph()
    tracer = OwnTracer(graph)
    x = tracer.proxy(graph.placeholder("x"))
    graph.output((x + 1).doubled().node)  # type: ignore[attr-defined]
    assert torch.equal(featx.GraphModule(nn.Module(), graph)(torch.ones(1)), torch.tensor([4.0]))


def test_subclass_sees_every_node_in_create_node() -> None:
    made: list[str] = []

    class Watching(featx.GraphAppendingTracer):
        def create_node(self, kind: str, target: Any, *args: Any, **kwargs: Any) -> featx.Node:
            made.append(kind)
            return super().create_node(kind, target, *args, **kwargs)

    graph = featx.Graph()
    x = featx.Proxy(graph.placeholder("x"), Watching(graph))
    torch.relu(x + 1).sum()  # type: ignore[arg-type]
    assert made == ["call_function", "call_function", "call_method"]


def test_subclass_may_answer_truth_iteration_and_keys() -> None:
    class Answering(featx.GraphAppendingTracer):
        def to_bool(self, obj: featx.Proxy) -> bool:
            return True

        def iter(self, obj: featx.Proxy) -> Iterator[Any]:
            return iter([obj[0], obj[1]])

        def keys(self, obj: featx.Proxy) -> Any:
            return ["scale"]

    graph = featx.Graph()
    tracer = Answering(graph)
    x = featx.Proxy(graph.placeholder("x"), tracer)
    options = featx.Proxy(graph.placeholder("options"), tracer)
    first, second = [*x]
    result = use_scale(first + second, **options) if x else None
    graph.output(result.node)
    module = featx.GraphModule(nn.Module(), graph)
    assert torch.equal(module(torch.tensor([1.0, 2.0]), {"scale": 5}), torch.tensor(15.0))


def use_scale(value: Any, scale: Any) -> Any:
    return value * scale


def test_default_tracer_refuses_truth_and_iteration_and_records_keys(x: featx.Proxy) -> None:
    with pytest.raises(featx.ControlFlowError, match="the graph"):
        bool(x)
    with pytest.raises(featx.ControlFlowError, match="unknown length"):
        iter(x)
    assert x.keys().node.target == "keys"


def test_asserts_are_refused_where_the_tracer_says_so() -> None:
    class Strict(featx.Tracer):
        trace_asserts = False

    namespace: dict[str, Any] = {}
    exec("def check(x):\n    assert x.shape[0] == 2\n    return x", namespace)
    with pytest.raises(featx.ControlFlowError):
        Strict().trace(namespace["check"])


def test_appending_tracer_mixes_with_nodes_made_by_hand(tracer: featx.GraphAppendingTracer, x: featx.Proxy) -> None:
    y = torch.tanh(torch.cat([x, x]))  # type: ignore[list-item]
    graph = tracer.graph
    graph.output(graph.call_function(torch.neg, (y.node,)))
    graph.lint()
    module = featx.GraphModule(nn.Module(), graph)
    value = torch.tensor([0.5])
    assert torch.equal(module(value), -torch.tanh(torch.cat([value, value])))
