from __future__ import annotations

import torch
from torch import nn

import featx
from featx.passes.hierarchy import Hierarchy


class Root(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Sequential(nn.Linear(3, 3), nn.ReLU()))
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor):
        return self.blocks(x) * self.scale


def test_modules_around_traced_nodes() -> None:
    traced = featx.symbolic_trace(Root())
    hierarchy = Hierarchy(traced)
    around = {node.name: hierarchy.around(node) for node in traced.graph.nodes}
    assert around["blocks_0_0"] == ("", "blocks", "blocks.0", "blocks.0.0")
    assert around["mul"] == around["x"] == ("",)
    assert around["mul"] is around["x"]
    assert [hierarchy.kind(path) for path in around["blocks_0_0"]] == ["Root", "Sequential", "Sequential", "Linear"]


def test_modules_that_are_kept_whole_and_graphs_without_meta() -> None:
    extractor = featx.create_feature_extractor(Root().eval(), ["blocks"], example_inputs=torch.rand(2, 3))
    node = next(node for node in extractor.graph.nodes if node.op == "call_module")
    assert Hierarchy(extractor).around(node) == ("", "blocks")
    graph = featx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_module("blocks.0", (x,)))
    module = featx.GraphModule(Root(), graph)
    hierarchy = Hierarchy(module)
    call = module.graph.find_nodes(op="call_module")[0]
    assert hierarchy.around(call) == ("", "blocks", "blocks.0")
    assert [hierarchy.kind(path) for path in hierarchy.around(call)] == ["GraphModule", "ModuleList", "Sequential"]
