from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import featx
from featx import Graph, GraphModule, Node
from featx.errors import GraphError

Build = Callable[[Graph, Node, Node], Any]


def fresh(graph: Graph, x: Node) -> Node:
    return graph.create_node("call_function", torch.neg, (x,), name="fresh")


def view(graph: Graph, x: Node) -> Node:
    return graph.create_node("call_method", "view", (x, -1), name="view")


def write(graph: Graph, x: Node) -> Node:
    return graph.create_node("call_method", "add_", (x, 1), name="write")


def write_to_input(graph: Graph, x: Node, y: Node) -> Node:
    write(graph, x)
    return y


def write_to_what_is_returned(graph: Graph, x: Node, y: Node) -> Node:
    value = fresh(graph, x)
    write(graph, value)
    return value


def write_whose_result_only_dead_code_reads(graph: Graph, x: Node, y: Node) -> Node:
    graph.create_node("call_function", operator.mul, (write(graph, x), 2), name="dead")
    return y


def write_through_a_view(graph: Graph, x: Node, y: Node) -> Node:
    value = fresh(graph, x)
    write(graph, view(graph, value))
    return value


def write_to_the_base_of_a_view_that_is_read_later(graph: Graph, x: Node, y: Node) -> Node:
    value = fresh(graph, x)
    seen = view(graph, value)
    write(graph, value)
    return seen


def write_through_a_view_of_a_view(graph: Graph, x: Node, y: Node) -> Node:
    value = fresh(graph, x)
    write(graph, graph.call_function(operator.getitem, (view(graph, value), 0)))
    return value


def write_into_one_chunk(graph: Graph, x: Node, y: Node) -> Node:
    value = fresh(graph, x)
    write(graph, graph.call_function(operator.getitem, (graph.call_method("chunk", (value, 2)), 0)))
    return value


def write_through_attribute(graph: Graph, x: Node, y: Node) -> Node:
    write(graph, graph.call_function(getattr, (x, "data")))
    return y


def set_item(graph: Graph, x: Node, y: Node) -> Node:
    graph.create_node("call_function", operator.setitem, (x, 0, 1), name="write")
    return y


def add_in_place(graph: Graph, x: Node, y: Node) -> Node:
    graph.create_node("call_function", operator.iadd, (x, 1), name="write")
    return y


def relu_function_in_place(graph: Graph, x: Node, y: Node) -> Node:
    graph.create_node("call_function", functional.relu, (x,), {"inplace": True}, name="write")
    return y


def relu_function_in_place_by_position(graph: Graph, x: Node, y: Node) -> Node:
    graph.create_node("call_function", functional.relu, (x, True), name="write")
    return y


def relu_with_underscore(graph: Graph, x: Node, y: Node) -> Node:
    graph.create_node("call_function", torch.relu_, (x,), name="write")
    return y


def relu_module_in_place(graph: Graph, x: Node, y: Node) -> Node:
    graph.create_node("call_module", "relu", (x,), name="write")
    return y


def out_argument(graph: Graph, x: Node, y: Node) -> Node:
    value = fresh(graph, x)
    graph.create_node("call_function", torch.abs, (y,), {"out": value}, name="write")
    return value


def out_arguments_that_the_schema_calls_otherwise(graph: Graph, x: Node, y: Node) -> Node:
    values = graph.call_function(torch.empty, (4,))
    indices = graph.call_function(torch.empty, (4,), {"dtype": torch.long})
    graph.create_node("call_function", torch.sort, (x,), {"out": (values, indices)}, name="write")
    return values


def initialise(graph: Graph, x: Node, y: Node) -> Node:
    graph.create_node("call_function", nn.init.zeros_, (x,), name="write")
    return y


def write_to_a_buffer(graph: Graph, x: Node, y: Node) -> Node:
    graph.create_node("call_method", "add_", (graph.get_attr("steps"), 1), name="write")
    return y


def write_behind_an_overload_that_returns_its_input(graph: Graph, x: Node, y: Node) -> Node:
    value = fresh(graph, x)
    write(graph, graph.call_function(torch.ops.aten.dropout.default, (value, 0.5, False)))
    return value


def write_into_an_item_of_joined_tuples(graph: Graph, x: Node, y: Node) -> Node:
    value = fresh(graph, x)
    halves = [graph.call_method("chunk", (node, 2)) for node in (value, y)]
    write(graph, graph.call_function(operator.getitem, (graph.call_function(operator.add, tuple(halves)), 0)))
    return value


def write_to_what_a_dict_holds(graph: Graph, x: Node, y: Node) -> Node:
    holder, value = graph.call_function(dict), fresh(graph, x)
    graph.call_function(operator.setitem, (holder, "k", value))
    write(graph, value)
    return graph.call_function(operator.getitem, (holder, "k"))


def write_by_unknown_function(graph: Graph, x: Node, y: Node) -> Node:
    graph.create_node("call_function", zero, (x,), name="write")
    return y


def zero(x: torch.Tensor) -> None:
    x.zero_()


LIVE_WRITES: list[Build] = [
    write_to_input, write_to_what_is_returned, write_whose_result_only_dead_code_reads, write_through_a_view,
    write_to_the_base_of_a_view_that_is_read_later, write_through_a_view_of_a_view, write_into_one_chunk,
    write_through_attribute, set_item, add_in_place, relu_function_in_place, relu_function_in_place_by_position,
    relu_with_underscore, relu_module_in_place, out_argument, out_arguments_that_the_schema_calls_otherwise, initialise,
    write_to_a_buffer, write_behind_an_overload_that_returns_its_input, write_into_an_item_of_joined_tuples,
    write_to_what_a_dict_holds, write_by_unknown_function,
]  # fmt: skip


def module_of(build: Build) -> GraphModule:
    root = nn.Module()
    root.relu, root.conv, root.norm = nn.ReLU(inplace=True), nn.Conv1d(1, 1, 1), nn.BatchNorm1d(1)
    root.dropout = nn.Dropout()
    root.register_buffer("steps", torch.zeros(1))
    graph = Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    graph.output(build(graph, x, y))
    return GraphModule(root, graph)


def run(module: GraphModule) -> list[torch.Tensor]:
    """Return everything that somebody can see after a run: the result, the inputs and the state."""
    inputs = [torch.tensor([-1.5, 2.0, -3.0, 4.0]), torch.tensor([3.0, 1.0, -2.0, 0.5])]
    result = module(*inputs)
    return [result, *inputs, *module.buffers()]


@pytest.mark.parametrize("build", LIVE_WRITES)
def test_live_write_stays_although_nobody_reads_its_result(build: Build) -> None:
    module = module_of(build)
    expected = run(copy.deepcopy(module))
    module.graph.eliminate_dead_code()
    assert "write" in [node.name for node in module.graph.nodes]
    for value, other in zip(run(module), expected, strict=True):
        assert torch.equal(value, other)


@pytest.mark.parametrize("build", LIVE_WRITES)
def test_each_of_these_writes_can_be_seen(build: Build) -> None:
    # The test above would say nothing about a write that changes nothing.
    module = module_of(build)
    before = run(copy.deepcopy(module))
    [node] = [node for node in module.graph.nodes if node.name == "write"]
    for user in list(node.users):
        module.graph.erase_node(user)
    module.graph.erase_node(node)
    assert any(not torch.equal(value, other) for value, other in zip(run(module), before, strict=True))


def remaining(build: Build) -> list[str]:
    module = module_of(build)
    changed = module.graph.eliminate_dead_code()
    names = [node.name for node in module.graph.nodes]
    assert changed == (len(names) < len(module_of(build).graph.nodes))
    module.graph.lint()
    return [name for name in names if name not in ("x", "y", "output")]


def pure_chain(graph: Graph, x: Node, y: Node) -> Node:
    graph.call_method("sum", (graph.call_function(torch.relu, (graph.call_function(operator.add, (x, y)),)),))
    return y


def pure_module(graph: Graph, x: Node, y: Node) -> Node:
    graph.call_module("conv", (x,))
    return y


def attribute_read(graph: Graph, x: Node, y: Node) -> Node:
    graph.get_attr("steps")
    return y


def write_into_dead_fresh_memory(graph: Graph, x: Node, y: Node) -> Node:
    write(graph, view(graph, graph.call_function(torch.mul, (x, 2))))
    return y


def write_after_the_last_read(graph: Graph, x: Node, y: Node) -> Node:
    value = fresh(graph, x)
    result = graph.create_node("call_function", torch.exp, (value,), name="result")
    write(graph, value)
    return result


@pytest.mark.parametrize(
    ("build", "kept"),
    [
        (pure_chain, []),
        (pure_module, []),
        (attribute_read, []),
        (write_into_dead_fresh_memory, []),
        (write_after_the_last_read, ["fresh", "result"]),
    ],
)
def test_dead_code_goes(build: Build, kept: list[str]) -> None:
    assert remaining(build) == kept


def draw(graph: Graph, x: Node, y: Node) -> Node:
    graph.call_function(torch.rand, (3,))
    return y


def draw_by_overload(graph: Graph, x: Node, y: Node) -> Node:
    graph.create_node("call_function", torch.ops.aten.bernoulli.default, (x,), name="rand")
    return y


def draw_of_a_module_in_training(graph: Graph, x: Node, y: Node) -> Node:
    graph.create_node("call_module", "dropout", (x,), name="rand")
    return y


def check(graph: Graph, x: Node, y: Node) -> Node:
    graph.create_node("call_function", torch._assert, (graph.call_method("all", (x,)), ""), name="check")
    return y


def statistics(graph: Graph, x: Node, y: Node) -> Node:
    graph.call_module("norm", (x,))
    return y


@pytest.mark.parametrize(
    ("build", "kept"),
    [(draw, ["rand"]), (draw_by_overload, ["rand"]), (draw_of_a_module_in_training, ["rand"]), (statistics, ["norm"]),
     (check, ["all_1", "check"])],
)  # fmt: skip
def test_draws_checks_and_running_statistics_stay(build: Build, kept: list[str]) -> None:
    assert remaining(build) == kept


def test_module_in_eval_mode_that_draws_and_counts_nothing_goes() -> None:
    def build(graph: Graph, x: Node, y: Node) -> Node:
        graph.call_module("norm", (x,))
        graph.call_module("dropout", (x,))
        return y

    module = module_of(build)
    module.eval()
    assert module.graph.eliminate_dead_code()
    assert [node.name for node in module.graph.nodes] == ["x", "y", "output"]


def test_unused_inputs_stay() -> None:
    assert not module_of(lambda graph, x, y: y).graph.eliminate_dead_code()


def test_second_run_changes_nothing() -> None:
    module = module_of(pure_chain)
    assert module.graph.eliminate_dead_code()
    assert not module.graph.eliminate_dead_code()


def test_own_rule_replaces_the_known_effects() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    write(graph, x)
    graph.call_function(torch.relu, (x,))
    graph.output(x)
    assert graph.eliminate_dead_code(lambda node: node.target is torch.relu)
    assert [node.name for node in graph.nodes] == ["x", "relu", "output"]


def test_malformed_graph_is_refused_and_not_changed() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    relu = graph.call_function(torch.relu, (x,))
    relu.append(x)
    graph.call_function(torch.neg, (x,))
    with pytest.raises(GraphError, match="before it is computed"):
        graph.eliminate_dead_code()
    assert len(graph.nodes) == 3


def test_a_network_that_is_cut_keeps_what_is_before_the_cut_alone() -> None:
    # Each ReLU and each sum writes in place what only dead code reads later.
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.relu = nn.Linear(4, 4), nn.ReLU(inplace=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            y += x
            return self.relu(y)

    model = nn.Sequential(*(Block() for _ in range(5)))
    x = torch.rand(2, 4)
    expected = model[:2](x)
    for trace in (torch.fx.symbolic_trace, featx.symbolic_trace):
        gm = trace(model)
        (end,) = [node for node in gm.graph.nodes if node.op == "output"]
        (last,) = [node for node in gm.graph.nodes if node.target == "1.relu"]
        end.args = (last,)
        gm.graph.eliminate_dead_code()
        gm.delete_all_unused_submodules()
        gm.recompile()
        assert len(gm.graph.nodes) == 2 + 2 * 3
        assert {name.split(".")[0] for name, _ in gm.named_parameters()} == {"0", "1"}
        assert torch.equal(gm(x), expected)


@pytest.mark.parametrize("args", [(0.5, "row", False), (0.5, "row", True), (0.5, "row")])
def test_stochastic_depth_stays_in_training_alone(args: tuple[Any, ...]) -> None:
    stochastic_depth = pytest.importorskip("torchvision.ops").stochastic_depth
    graph = Graph()
    x = graph.placeholder("x")
    graph.call_function(stochastic_depth, (x, *args))
    graph.output(x)
    is_training = args[-1] is not False
    assert graph.eliminate_dead_code() is not is_training
    assert len(graph.nodes) == 2 + is_training
