from __future__ import annotations

import collections
import operator
import traceback
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import featx
from featx import Graph, GraphModule, Interpreter, symbolic_trace
from featx.errors import ArgumentTypeError, GraphError, TargetError

X = torch.tensor([[1.0, -2.0, 3.0]])


class Model(nn.Module):
    """Needs a node of each opcode."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
        self.scale = nn.Parameter(torch.rand(3))

    def forward(self, x: torch.Tensor):
        return torch.cat([self.block(x) * self.scale, x], dim=1).clamp(min=0.25)


class Recorder(Interpreter):
    """Notes which method is called with which target."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.calls: list[tuple[str, Any]] = []

    def run_node(self, n: Any):
        self.calls.append(("run_node", n.name))
        return super().run_node(n)

    def placeholder(self, target: Any, args: Any, kwargs: Any):
        self.calls.append(("placeholder", target))
        return super().placeholder(target, args, kwargs)

    def get_attr(self, target: Any, args: Any, kwargs: Any):
        self.calls.append(("get_attr", target))
        return super().get_attr(target, args, kwargs)

    def call_function(self, target: Any, args: Any, kwargs: Any):
        self.calls.append(("call_function", target))
        return super().call_function(target, args, kwargs)

    def call_method(self, target: Any, args: Any, kwargs: Any):
        self.calls.append(("call_method", target))
        return super().call_method(target, args, kwargs)

    def call_module(self, target: Any, args: Any, kwargs: Any):
        self.calls.append(("call_module", target))
        return super().call_module(target, args, kwargs)

    def output(self, target: Any, args: Any, kwargs: Any):
        self.calls.append(("output", target))
        return super().output(target, args, kwargs)


def chain(length: int) -> tuple[GraphModule, list[featx.Node]]:
    """Return a module that negates its input so often, and its nodes."""
    graph = Graph()
    value = graph.placeholder("x")
    for _ in range(length):
        value = graph.call_function(torch.neg, (value,))
    graph.output(value)
    return GraphModule(nn.Module(), graph), list(graph.nodes)


# -- running ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("garbage_collect_values", [True, False])
def test_run_computes_what_the_model_computes(garbage_collect_values: bool) -> None:
    model = Model()
    assert torch.equal(Interpreter(symbolic_trace(model), garbage_collect_values).run(X), model(X))


def test_each_node_goes_through_run_node_and_the_method_of_its_opcode() -> None:
    interpreter = Recorder(symbolic_trace(Model()))
    interpreter.run(X)
    assert interpreter.calls == [
        ("run_node", "x"), ("placeholder", "x"),
        ("run_node", "block_0"), ("call_module", "block.0"),
        ("run_node", "block_1"), ("call_module", "block.1"),
        ("run_node", "scale"), ("get_attr", "scale"),
        ("run_node", "mul"), ("call_function", operator.mul),
        ("run_node", "cat"), ("call_function", torch.cat),
        ("run_node", "clamp"), ("call_method", "clamp"),
        ("run_node", "output"), ("output", "output"),
    ]  # fmt: skip


def test_method_that_is_put_on_the_interpreter_itself_is_called() -> None:
    interpreter = Interpreter(chain(3)[0])
    interpreter.call_function = lambda target, args, kwargs: args[0] + 1  # type: ignore[method-assign]
    assert interpreter.run(0) == 3


def test_run_of_a_graph_without_output_returns_none_and_leaves_the_last_value_in_env() -> None:
    graph = Graph()
    last = graph.call_function(torch.neg, (graph.placeholder("x"),))
    interpreter = Interpreter(GraphModule(nn.Module(), graph))
    assert interpreter.run(2 * X) is None
    assert torch.equal(interpreter.env[last], -2 * X)


def test_graph_that_is_given_runs_on_the_state_of_the_module() -> None:
    model = Model()
    graph = Graph()
    graph.output(graph.call_module("block.0", (graph.placeholder("x"),)))
    assert torch.equal(Interpreter(model, graph=graph).run(X), model.block[0](X))


def test_module_and_graph_are_as_before() -> None:
    traced = symbolic_trace(Model())
    state, edits, code = dict(traced.__dict__), traced.graph.edits, traced.code
    Interpreter(traced).run(X)
    assert traced.__dict__ == state
    assert (traced.graph.edits, traced.code) == (edits, code)
    assert all(set(node.__dict__) == set() for node in traced.graph.nodes)


@pytest.mark.parametrize("module", [Model(), torch.fx.symbolic_trace(Model())], ids=["no graph", "torch.fx"])
def test_module_without_a_featx_graph_is_refused(module: nn.Module) -> None:
    with pytest.raises(ArgumentTypeError, match=r"has no featx graph to run; pass what featx\.trace"):
        Interpreter(module)


def test_attributes_that_torch_fx_has_are_there() -> None:
    ours, theirs = Interpreter(symbolic_trace(Model())), torch.fx.Interpreter(torch.fx.symbolic_trace(Model()))
    for name in ("name", "garbage_collect_values", "extra_traceback", "env"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert {path for path in ours.submodules if path} == {path for path in theirs.submodules if path}
    ours.run(X)
    theirs.run(X)
    assert [node.name for node in ours.env] == [node.name for node in theirs.env] == ["output"]
    last_uses, expected = (
        {user.name: {node.name for node in nodes} for user, nodes in interpreter.user_to_last_uses.items()}
        for interpreter in (ours, theirs)
    )
    assert last_uses == expected


def test_submodules_have_every_path_of_a_shared_module() -> None:
    layer = nn.ReLU()
    traced = symbolic_trace(nn.Sequential(layer, layer))
    traced.add_submodule("again", layer)
    assert [path for path, module in Interpreter(traced).submodules.items() if module is layer] == ["0", "again"]


# -- values -----------------------------------------------------------------------------------------------------------


def test_values_are_dropped_after_their_last_use() -> None:
    sizes: list[int] = []

    class Watching(Interpreter):
        def run_node(self, n: Any):
            sizes.append(len(self.env))
            return super().run_node(n)

    module, _ = chain(5)
    Watching(module).run(X)
    assert max(sizes) == 1
    sizes.clear()
    interpreter = Watching(module, garbage_collect_values=False)
    interpreter.run(X)
    assert len(interpreter.env) == 7


def test_values_to_drop_can_be_assigned() -> None:
    module, nodes = chain(3)
    interpreter = Interpreter(module)
    interpreter.user_to_last_uses = {nodes[2]: [nodes[0]]}
    interpreter.run(X)
    assert set(interpreter.env) == {nodes[1], nodes[2], nodes[3], nodes[4]}


def test_boxed_run_empties_the_list_and_frees_inputs_after_their_last_use() -> None:
    alive: list[bool] = []

    class Watching(Interpreter):
        def call_function(self, target: Any, args: Any, kwargs: Any):
            alive.append(reference() is not None)
            return super().call_function(target, args, kwargs)

    value = torch.rand(3)
    expected = -value
    reference = weakref.ref(value)
    arguments = [value]
    del value
    result = Watching(chain(3)[0]).boxed_run(arguments)
    assert torch.equal(result, expected)
    assert arguments == []
    assert alive == [True, False, False]


def test_values_in_initial_env_are_not_computed_and_the_dict_is_not_changed() -> None:
    module, nodes = chain(3)
    interpreter = Recorder(module)
    given = {nodes[0]: None, nodes[1]: None, nodes[2]: X}
    assert torch.equal(interpreter.run(initial_env=given), -X)
    assert [call for call in interpreter.calls if call[0] == "run_node"] == [
        ("run_node", "neg_2"),
        ("run_node", "output"),
    ]
    assert list(given) == nodes[:3]


def test_arguments_are_nested_as_in_the_graph_with_values_for_nodes() -> None:
    Pair = collections.namedtuple("Pair", "left right")
    graph = Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    node = graph.call_function(
        dict, (), {"a": [x, (y, 1)], "b": {"c": slice(x, y)}, "d": Pair(x, None), "e": torch.Size([2])}
    )
    graph.output(node)
    interpreter = Interpreter(GraphModule(nn.Module(), graph))
    interpreter.env = {x: 5, y: 6}
    args, kwargs = interpreter.fetch_args_kwargs_from_env(node)
    assert args == ()
    assert kwargs == {"a": [5, (6, 1)], "b": {"c": slice(5, 6)}, "d": Pair(5, None), "e": torch.Size([2])}
    assert [type(kwargs[key]) for key in "abde"] == [list, dict, Pair, torch.Size]
    assert interpreter.map_nodes_to_values([x, y], node) == [5, 6]
    assert interpreter.run(5, 6) == kwargs


def test_list_in_the_arguments_is_a_new_list_each_time_as_in_the_generated_code() -> None:
    def grown(values: list[Any]) -> int:
        values.append(0)
        return len(values)

    graph = Graph()
    graph.output(graph.call_function(grown, ([graph.placeholder("x"), 1],)))
    module = GraphModule(nn.Module(), graph)
    interpreter = Interpreter(module)
    assert (module(X), interpreter.run(X), interpreter.run(X)) == (3, 3, 3)


def test_tensor_that_stands_in_the_graph_follows_the_module_to_its_device() -> None:
    graph = Graph()
    graph.output(graph.call_function(torch.add, (graph.placeholder("x"), torch.ones(1, 3))))
    module = GraphModule(nn.Module(), graph)
    assert torch.equal(Interpreter(module).run(X), X + 1)
    module.to("meta")
    assert module(X.to("meta")).is_meta
    assert Interpreter(module).run(X.to("meta")).is_meta


def test_attribute_is_fetched_as_it_is_now() -> None:
    model = Model()
    traced = symbolic_trace(model)
    interpreter = Interpreter(traced)
    assert interpreter.fetch_attr("block.0.weight") is model.block[0].weight
    assert interpreter.fetch_attr("block.1") is model.block[1]
    assert interpreter.fetch_attr("training") is True
    traced.block._modules["1"] = nn.Sigmoid()
    assert torch.equal(interpreter.run(X), traced(X))


@pytest.mark.parametrize(("path", "part"), [("block.7", "7"), ("block.0.weights", "weights"), ("blok.0", "blok")])
def test_missing_attribute_is_named(path: str, part: str) -> None:
    interpreter = Interpreter(symbolic_trace(Model()))
    with pytest.raises(
        TargetError, match=rf"refers to '{path}', but Model has no such attribute: '{part}' is missing in"
    ):
        interpreter.fetch_attr(path)


def test_module_that_was_deleted_is_an_error_that_names_the_node() -> None:
    traced = symbolic_trace(Model())
    interpreter = Interpreter(traced)
    traced.delete_submodule("block.1")
    with pytest.raises(TargetError, match="'1' is missing") as caught:
        interpreter.run(X)
    assert "%block_1" in "".join(traceback.format_exception(caught.value))


def test_value_that_is_not_there_is_an_error_that_names_both_nodes() -> None:
    module, nodes = chain(2)
    with pytest.raises(GraphError, match="node 'neg_1' reads 'neg', which has not run or whose value was dropped"):
        Interpreter(module).run_node(nodes[2])
