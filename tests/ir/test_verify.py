from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from featx import Graph, GraphModule, Node
from featx.errors import ArgumentTypeError, ForeignNodeError, GraphError, TargetError
from featx.ir.verify import find_attribute, verify_targets


def chain() -> tuple[Graph, list[Node]]:
    """Return x -> relu -> neg -> output."""
    graph = Graph()
    x = graph.placeholder("x")
    relu = graph.call_function(torch.relu, (x,))
    graph.output(graph.call_function(torch.neg, (relu,)))
    return graph, list(graph.nodes)


def model() -> nn.Module:
    root = nn.Module()
    root.block = nn.Sequential(nn.Linear(2, 2))
    root.scale = nn.Parameter(torch.ones(1))
    return root


def test_graph_that_is_well_formed_passes() -> None:
    graph, _ = chain()
    graph.lint()


def test_empty_graph_passes() -> None:
    Graph().lint()


def test_node_moved_before_its_input_is_caught() -> None:
    graph, (_, relu, neg, _) = chain()
    neg.append(relu)
    with pytest.raises(GraphError, match=r"'neg' reads 'relu' before it is computed; move one of them"):
        graph.lint()


def test_cycle_is_caught() -> None:
    graph, (_, relu, neg, _) = chain()
    relu.args = (neg,)
    with pytest.raises(GraphError, match="'relu' reads 'neg' before it is computed"):
        graph.lint()


def test_node_that_reads_itself_is_caught() -> None:
    graph, (_, relu, _, _) = chain()
    relu.update_arg(0, relu)
    with pytest.raises(GraphError, match="'relu' reads 'relu' before it is computed"):
        graph.lint()


def test_argument_of_another_graph_is_caught() -> None:
    graph, (_, _, neg, _) = chain()
    _, (foreign, *_) = chain()
    neg.kwargs = {"out": [foreign]}
    with pytest.raises(ForeignNodeError, match=r"'neg' reads 'x', which belongs to another graph; .*node_copy"):
        graph.lint()


def test_argument_that_was_erased_is_caught() -> None:
    graph, (x, _, neg, _) = chain()
    erased = graph.call_function(torch.abs, (x,))
    graph.erase_node(erased)
    neg.args = (erased,)
    with pytest.raises(ForeignNodeError, match="'neg' reads 'abs_1', which was erased"):
        graph.lint()


def test_erased_node_that_reads_again_is_caught() -> None:
    graph, (x, *_) = chain()
    erased = graph.call_function(torch.abs)
    graph.erase_node(erased)
    erased.args = (x,)
    with pytest.raises(GraphError, match="'x' lists 'abs_1' as a user, which does not read it"):
        graph.lint()


def test_two_nodes_of_one_name_are_caught() -> None:
    graph, (_, _, neg, _) = chain()
    neg.name = "relu"
    with pytest.raises(GraphError, match="two nodes are named 'relu'; rename one of them"):
        graph.lint()


@pytest.mark.parametrize(("op", "expected"), [("call_module", "a string"), ("get_attr", "a string")])
def test_opcode_that_does_not_fit_its_target_is_caught(op: str, expected: str) -> None:
    graph, (_, relu, _, _) = chain()
    relu.op = op
    with pytest.raises(ArgumentTypeError, match=f"target of {op} node 'relu' must be {expected}"):
        graph.lint()


@pytest.mark.parametrize(
    ("op", "target", "message"),
    [
        ("call_module", "block.1", "'1' is missing in Sequential"),
        ("call_module", "block.0.weights", "'weights' is missing in Linear"),
        ("call_module", "head", "'head' is missing in"),
        ("get_attr", "scales", "'scales' is missing in"),
        ("get_attr", "block.0.weight.nothing", "'nothing' is missing in Parameter"),
    ],
)
def test_target_that_the_owner_lacks_is_caught(op: str, target: str, message: str) -> None:
    module = GraphModule(model(), chain()[0])
    module.add_submodule("block", nn.Sequential(nn.Linear(2, 2)))
    module.graph.create_node(op, target, name="lost")
    with pytest.raises(TargetError, match=f"'lost' .{op}. refers to '{target}', but .*{message}"):
        module.graph.lint()


def test_call_of_a_parameter_is_caught() -> None:
    graph, _ = chain()
    graph.call_module("scale")
    with pytest.raises(TargetError, match="'scale' calls 'scale' of Module, which is a Parameter and not a module"):
        verify_targets(graph, model())


def test_targets_are_not_asked_for_without_an_owner() -> None:
    graph, _ = chain()
    graph.call_module("no.such.module")
    graph.lint()


@pytest.mark.parametrize("path", ["scale", "block", "block.0", "block.0.weight", "block.0.in_features"])
def test_attribute_is_found_at_its_path(path: str) -> None:
    root: Any = model()
    expected = {
        "scale": root.scale,
        "block": root.block,
        "block.0": root.block[0],
        "block.0.weight": root.block[0].weight,
        "block.0.in_features": 2,
    }
    assert find_attribute(root, path, Graph().get_attr(path)) is expected[path]


def test_attribute_that_is_none_is_found() -> None:
    root = nn.Linear(2, 2, bias=False)
    assert find_attribute(root, "bias", Graph().get_attr("bias")) is None
