from __future__ import annotations

import copy
import pickle

import pytest
import torch
from drawn import Block, Twice

import featx
from featx.drawing.scopes import place_nodes


def paths(graph: featx.Graph) -> dict[str, str]:
    """Return the path of the innermost module call around each node, by the node's name."""
    return {node.name: scope[-1].path if scope else "" for node, scope in place_nodes(graph)}


@pytest.mark.parametrize(
    "traced", [featx.symbolic_trace(Twice()), featx.trace(Twice(), torch.ones(1, 4))], ids=["symbolic", "example"]
)
def test_nodes_are_in_the_modules_that_ran_them(traced: featx.GraphModule) -> None:
    found = paths(traced.graph)
    assert found["x"] == found["output"] == ""
    assert [found[name] for name in ("block_linear", "block_act", "block_linear_1", "mul")] == [
        "block", "block", "block", "scale",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "changed",
    [
        lambda module: module,
        copy.deepcopy,
        lambda module: pickle.loads(pickle.dumps(module)),
        lambda module: featx.from_torch_fx(featx.to_torch_fx(module)),
    ],
    ids=["as it is", "deepcopy", "pickle", "torch.fx"],
)
def test_calls_of_one_module_are_told_apart(changed: object) -> None:
    assert callable(changed)
    graph = changed(featx.symbolic_trace(Twice())).graph
    calls = {scope[-1].key for _, scope in place_nodes(graph) if scope and scope[-1].path == "block"}
    assert len(calls) == 3


def test_node_without_meta_is_where_its_neighbours_are() -> None:
    traced = featx.symbolic_trace(torch.nn.Sequential(Block(), Block()))
    inside, between = (node for node in traced.graph.nodes if node.name in ("_0_act", "_1_linear"))
    with traced.graph.inserting_after(inside):
        traced.graph.call_function(torch.neg, (inside,))
    with traced.graph.inserting_before(between):
        traced.graph.call_function(torch.abs, between.args)
    found = paths(traced.graph)
    assert (found["neg"], found["abs_1"]) == ("0", "")


def test_graph_without_any_meta_is_flat() -> None:
    graph = featx.Graph()
    graph.output(graph.call_function(torch.relu, (graph.placeholder("x"),)))
    assert set(paths(graph).values()) == {""}


@pytest.mark.parametrize("stack", ["layer1", {"a": None}, {1: (2, 3)}, [1], {"": ("", torch.nn.Module)}])
def test_foreign_stacks_do_no_harm(stack: object) -> None:
    traced = featx.symbolic_trace(Block())
    for node in traced.graph.nodes:
        node.meta["nn_module_stack"] = stack
    assert [node.name for node, _ in place_nodes(traced.graph)] == ["x", "linear", "act", "add", "output"]


def test_attributes_stand_ahead_of_their_first_reader_in_its_modules() -> None:
    traced = featx.symbolic_trace(torch.nn.Sequential(Block(), Block()))
    first = next(iter(traced.graph.nodes))
    with traced.graph.inserting_before(first):
        weight = traced.graph.get_attr("1.linear.weight")
    add, later = (node for node in traced.graph.nodes if node.name in ("add", "_1_linear"))
    later.args = (weight,)
    add.args = (weight, add.args[1])
    order = [node.name for node, _ in place_nodes(traced.graph)]
    assert order[order.index("add") - 1] == weight.name
    assert paths(traced.graph)[weight.name] == "0"
