from __future__ import annotations

import pytest
import torch
from drawn import Block, folder_at, leaf_at, outline
from torch import Tensor, nn

import featx


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x) * scale, scale + 1


def split() -> featx.GraphModule:
    """Return a graph that calls one graph module twice, as splitting a model leaves it after."""
    inner = featx.symbolic_trace(Inner())
    graph = featx.Graph()
    x, scale = graph.placeholder("x"), graph.placeholder("scale")
    first = graph.call_module("stage", (x,), {"scale": scale})
    parts = [graph.call_function(lambda pair, place: pair[place], (first, place)) for place in (0, 1)]
    second = graph.call_module("stage", (parts[0], parts[1]))
    graph.output(second)
    return featx.GraphModule({"stage": inner}, graph, "Split")


def test_graph_module_is_a_folder_with_its_graph() -> None:
    stage = ["x", "scale", "linear", "mul", "add", "output"]
    root = featx.draw(split()).root
    assert [item[0] if isinstance(item, list) else "leaf" for item in outline(root)] == [
        "leaf", "leaf", "stage", "leaf", "leaf", "stage", "leaf",
    ]  # fmt: skip
    assert [outline(folder) for folder in root.folders() if folder.path == "stage"] == [stage, stage]
    assert [(folder.type_name, folder.call) for folder in root.folders()][1:] == [("Inner", 1), ("Inner", 2)]


def test_values_flow_through_the_nested_graph() -> None:
    leaves = list(featx.draw(split()).root.leaves())
    # 0 x, 1 scale; 2 x, 3 scale, 4 linear, 5 mul, 6 add, 7 output of the first call; 8, 9 its parts; the second; 16.
    assert [leaf.inputs for leaf in leaves] == [
        (), (), (0,), (1,), (2,), (4, 3), (3,), (5, 6),
        (7,), (7,),
        (8,), (9,), (10,), (12, 11), (11,), (13, 14),
        (15,),
    ]  # fmt: skip
    assert [leaf.index for leaf in leaves] == list(range(17))


def test_weights_of_a_graph_module_that_is_called_twice_count_once() -> None:
    leaves = list(featx.draw(split()).root.leaves())
    assert sum(leaf.new_parameters for leaf in leaves) == 20
    assert sum(leaf.parameters for leaf in leaves) == 40


def test_graph_modules_in_graph_modules() -> None:
    graph = featx.Graph()
    graph.output(graph.call_module("all", (graph.placeholder("a"), graph.placeholder("b"))))
    root = featx.draw(featx.GraphModule({"all": split()}, graph)).root
    assert {folder.path for folder in root.folders()} == {"", "all", "all.stage"}
    assert len(list(root.leaves())) == 17 + 3
    assert folder_at(root, "all.stage").type_name == "Inner"


def test_nested_graph_with_modules_of_its_own() -> None:
    inner = featx.symbolic_trace(nn.Sequential(Block(), Block()))
    graph = featx.Graph()
    graph.output(graph.call_module("stage", (graph.placeholder("x"),)))
    root = featx.draw(featx.GraphModule({"stage": inner}, graph)).root
    block = ["linear", "act", "add"]
    assert outline(folder_at(root, "stage")) == ["input", ["0", block], ["1", block], "output"]


def test_nodes_of_nested_graphs_can_be_marked_and_have_costs_of_their_own() -> None:
    module = split()
    linear = next(node for node in module.get_submodule("stage").graph.nodes if node.name == "linear")
    drawing = featx.draw(module, highlight=[linear], cost={linear: 3, "x": 5})
    assert [leaf.node_name for leaf in drawing.root.leaves() if leaf.is_highlighted] == ["linear", "linear"]
    costs = [(leaf.index, leaf.costs["cost"]) for leaf in drawing.root.leaves() if leaf.costs]
    # A name means a node of the graph that is drawn.
    assert costs == [(0, 5), (4, 3), (12, 3)]


def test_graph_that_takes_anything_reads_all_that_is_passed() -> None:
    def function(*args: Tensor, **options: Tensor) -> Tensor:
        return args[0] + options["y"]

    inner = featx.symbolic_trace(function)
    graph = featx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    graph.output(graph.call_module("stage", (x,), {"y": y}))
    leaves = list(featx.draw(featx.GraphModule({"stage": inner}, graph)).root.leaves())
    assert {leaf.inputs for leaf in leaves[2:] if leaf.operation == "input"} == {(0, 1)}


def test_page_of_a_nested_graph_is_written() -> None:
    drawing = featx.draw(split(), depth=5)
    assert "linear" in drawing.html()
    assert drawing.dot.count("subgraph") == 2
    assert leaf_at(drawing.root, "linear").settings == "in_features=4, out_features=4, bias=True"


def test_empty_graph_module_is_a_box() -> None:
    graph = featx.Graph()
    graph.call_module("stage", (graph.placeholder("x"),))
    module = featx.GraphModule({"stage": featx.GraphModule({}, featx.Graph())}, graph)
    assert [leaf.kind for leaf in featx.draw(module).root.leaves()] == ["io", "module"]


@pytest.mark.parametrize("depth", [0, 1, 9])
def test_split_of_a_real_model_runs_and_is_drawn(depth: int) -> None:
    stages = nn.ModuleDict(
        {"a": featx.symbolic_trace(nn.Sequential(Block(), Block())), "b": featx.symbolic_trace(Block())}
    )
    graph = featx.Graph()
    graph.output(graph.call_module("b", (graph.call_module("a", (graph.placeholder("x"),)),)))
    module = featx.GraphModule(stages, graph)
    assert module(torch.ones(1, 4)).shape == (1, 4)
    assert featx.draw(module, depth=depth).html()
