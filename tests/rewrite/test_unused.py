from __future__ import annotations

import copy

import torch
from torch import nn

import featx
from featx import Graph, GraphModule
from featx.rewrite.unused import prefixes, remove_unused_modules


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Sequential(nn.Tanh()))
        self.head = nn.Linear(4, 4)


def module_calling(*targets: str) -> tuple[Model, GraphModule]:
    graph = Graph()
    value = graph.placeholder("x")
    for target in targets:
        value = graph.call_module(target, (value,))
    graph.output(value)
    model = Model()
    return model, GraphModule(model, graph)


def paths(module: nn.Module) -> list[str]:
    return [name for name, _ in module.named_modules() if name]


def erase_last(gm: GraphModule) -> str:
    node = gm.graph.output_node().all_input_nodes[0]
    node.replace_all_uses_with(node.all_input_nodes[0])
    gm.graph.erase_node(node)
    return node.target


def test_module_goes_with_the_containers_that_this_empties() -> None:
    model, gm = module_calling("head", "block.2.0")
    remove_unused_modules(gm, [erase_last(gm)])
    assert paths(gm) == ["head"]
    assert paths(model) == ["block", "block.0", "block.1", "block.2", "block.2.0", "head"]


def test_what_a_graph_still_calls_or_reads_from_stays() -> None:
    _, gm = module_calling("block.0", "head", "head")
    remove_unused_modules(gm, [erase_last(gm), "block", "block.0", "nothing.there"])
    assert paths(gm) == ["block", "block.0", "head"]
    _, gm = module_calling("head", "head")
    with gm.graph.inserting_before(gm.graph.output_node()):
        gm.graph.output_node().args = ((gm.graph.output_node().args[0], gm.graph.get_attr("head.weight")),)
    remove_unused_modules(gm, ["head"])
    assert paths(gm) == ["head"]


def test_inside_of_a_module_of_the_model_stays() -> None:
    model, gm = module_calling("block", "block.0")
    remove_unused_modules(gm, [erase_last(gm)])
    assert [type(part) for part in model.block] == [nn.Linear, nn.ReLU, nn.Sequential]
    assert torch.equal(gm(torch.ones(4)), model.block(torch.ones(4)))


def test_copies_keep_theirs() -> None:
    _, gm = module_calling("block.0", "block.1")
    other = copy.copy(gm)
    remove_unused_modules(gm, [erase_last(gm)])
    assert paths(gm) == ["block", "block.0"]
    assert paths(other) == ["block", "block.0", "block.1"]


def test_pattern_that_is_replaced_inside_a_called_module_leaves_the_model_alone() -> None:
    class Pattern(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)

    model, gm = module_calling("block", "block.0")
    assert featx.replace_pattern(gm, Pattern(), nn.Identity(), match_modules="type")
    assert len(model.block) == 3


def test_prefixes_are_the_paths_and_what_they_lie_below() -> None:
    assert prefixes(["a.b.c", "a.d"]) == {"a", "a.b", "a.b.c", "a.d"}
