"""QualifiedNames: nodes are named by the path of the module that made them and what they do there."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

import featx
from featx.tracing.nodes.naming import QualifiedNames


def names(model: nn.Module) -> list[str | None]:
    return [node.meta.get("qualified_name") for node in featx.Tracer().trace(model).nodes if node.op != "output"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)
        self.relu = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.relu(self.relu(self.conv(x)) + x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(functional.relu(self.blocks(x))).flatten(1)


def test_name_is_the_path_of_the_module_and_what_it_does() -> None:
    assert names(Net()) == [
        "x",
        "blocks.0.conv",
        "blocks.0.relu",
        "blocks.0.add",
        "blocks.0.relu_1",
        "blocks.1.conv",
        "blocks.1.relu",
        "blocks.1.add",
        "blocks.1.relu_1",
        "relu",
        "relu_1",
        "flatten",
    ]


class Numbered(nn.Module):
    """Children whose own names look like numbered calls."""

    def __init__(self) -> None:
        super().__init__()
        self.conv_1 = nn.Conv2d(3, 3, 1)
        self.conv_2 = nn.Conv2d(3, 3, 1)
        self.conv = nn.Conv2d(3, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(self.conv(self.conv_2(self.conv_1(x))))


def test_module_keeps_its_own_name_and_repeated_calls_pass_it_over() -> None:
    assert names(Numbered()) == ["x", "conv_1", "conv_2", "conv", "conv_3"]


class FunctionNamedLikeAModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.relu = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.relu(functional.relu(x))


def test_function_that_runs_before_a_module_of_its_name_is_numbered() -> None:
    assert names(FunctionNamedLikeAModule()) == ["x", "relu_1", "relu"]


class ReadsParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = x.shape
        return x.view(shape) * self.scale


class OuterOfParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = ReadsParameter()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def test_attribute_read_is_named_by_the_attribute_below_the_reading_module() -> None:
    # The read's own name has the whole path in it already; so it is in torchvision's lists.
    assert names(OuterOfParameter()) == ["x", "inner.getattr", "inner.view", "inner.inner_scale", "inner.mul"]


def test_every_name_is_given_once() -> None:
    found = names(Net())
    assert len(found) == len(set(found))


def test_output_has_no_qualified_name() -> None:
    graph = featx.Tracer().trace(Net())
    assert "qualified_name" not in graph.output_node().meta


def test_repeated_call_is_numbered_past_a_module_that_comes_later() -> None:
    graph = featx.Graph()
    x = graph.placeholder("x")
    collected = QualifiedNames()
    nodes = [graph.call_module("a", (x,)), graph.call_module("a", (x,)), graph.call_module("a_1", (x,))]
    for node, path in zip(nodes, ["a", "a", "a_1"], strict=True):
        collected.add(node, path)
    collected.assign()
    assert [node.meta["qualified_name"] for node in nodes] == ["a", "a_2", "a_1"]


def test_nodes_have_the_stack_of_module_calls_they_were_made_in() -> None:
    graph = featx.Tracer().trace(Net())
    add = next(node for node in graph.nodes if node.meta.get("qualified_name") == "blocks.1.add")
    stack = add.meta["nn_module_stack"]
    assert [(path, kind) for path, kind in stack.values()] == [("blocks", nn.Sequential), ("blocks.1", Block)]
