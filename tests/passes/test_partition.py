from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.fx
from torch import nn
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.operator_support import create_op_support

import featx
from featx import GraphModule, Node, symbolic_trace
from featx.passes import partition

X = torch.arange(8.0).reshape(2, 4) - 3


def islands(module: Any) -> dict[str, list[str]]:
    return {
        name: [node.name for node in child.graph.nodes if node.op.startswith("call")]
        for name, child in module.named_children()
        if hasattr(child, "graph")
    }


def is_relu(node: Node) -> bool:
    return node.target is torch.relu


def test_neighbours_go_together_and_others_stay_outside() -> None:
    gm = symbolic_trace(lambda x: torch.relu(torch.neg(torch.relu(torch.relu(x)))))
    parts = partition(gm, is_relu)
    parts.graph.lint()
    assert islands(parts) == {"submod_0": ["relu", "relu_1"], "submod_1": ["relu_2"]}
    assert [node.name for node in parts.graph.nodes] == ["x", "submod_0", "neg", "submod_1", "output"]
    assert torch.equal(parts(X), gm(X))


def test_branches_that_do_not_need_each_other_are_one_child_unless_that_makes_a_cycle() -> None:
    # Supported: a, d, e. Unsupported b lies between a and d, so a and d are two children; e may be in either.
    def forward(x: torch.Tensor) -> torch.Tensor:
        a = torch.relu(x)
        d = torch.relu(torch.neg(a))
        e = torch.relu(x + 1)
        return a + d + e

    gm = symbolic_trace(forward)
    parts = partition(gm, is_relu)
    assert len(islands(parts)) == 2
    assert torch.equal(parts(X), forward(X))


def test_few_nodes_stay_outside() -> None:
    gm = symbolic_trace(lambda x: torch.relu(torch.neg(torch.relu(torch.relu(x)))))
    assert islands(partition(gm, is_relu, min_nodes=2)) == {"submod_0": ["relu", "relu_1"]}
    assert islands(partition(gm, is_relu, min_nodes=3)) == {}


def test_nothing_supported_leaves_the_graph_as_it_was() -> None:
    gm = symbolic_trace(lambda x: torch.neg(x))
    assert str(partition(gm, is_relu).graph) == str(gm.graph)


def test_write_between_supported_nodes_parts_them() -> None:
    gm = symbolic_trace(lambda x: (torch.relu(x), x.add_(1), torch.relu(x)))
    parts = partition(gm, is_relu)
    assert islands(parts) == {"submod_0": ["relu"], "submod_1": ["relu_1"]}
    torch.testing.assert_close(parts(X.clone()), gm(X.clone()), rtol=0, atol=0)


def test_switches_and_draws_keep_their_places() -> None:
    def forward(x: torch.Tensor) -> Any:
        a = torch.relu(x)
        with torch.no_grad():
            b = torch.relu(x) + torch.rand(2, 4)
        return a, b, torch.relu(x), torch.rand(2)

    gm = featx.trace(forward, X)
    parts = partition(gm, is_relu)
    assert len(islands(parts)) == 3
    results = []
    for module in (gm, parts):
        torch.manual_seed(0)
        results.append(module(X.clone().requires_grad_()))
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)
    assert [value.requires_grad for value in results[1]] == [True, False, True, False]


def test_weights_go_to_where_they_are_used_and_are_shared() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    gm = symbolic_trace(model)
    parts = partition(
        gm, lambda node: node.op == "call_module" and isinstance(gm.get_submodule(node.target), nn.Linear)
    )
    assert islands(parts) == {"submod_0": ["_0"], "submod_1": ["_2"]}
    assert parts.get_parameter("submod_0.0.weight") is model[0].weight
    assert not hasattr(parts, "0")
    assert torch.equal(parts(X), model(X))


def test_names_of_children_do_not_collide_with_those_of_the_model() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.submod_0 = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.submod_0(x))

    model = Model()
    parts = partition(symbolic_trace(model), is_relu)
    assert islands(parts) == {"submod_1": ["relu"]}
    assert torch.equal(parts(X), model(X))


@pytest.mark.slow
def test_random_graphs_have_at_most_the_children_of_torch_fx() -> None:
    for seed in range(40):
        choice = random.Random(seed)
        graphs = featx.Graph(), torch.fx.Graph()
        values: list[list[Any]] = [[graph.placeholder("x"), graph.placeholder("y")] for graph in graphs]
        for _ in range(20):
            target = choice.choice((torch.add, torch.sub))
            picks = [choice.randrange(max(0, len(values[0]) - 6), len(values[0])) for _ in range(2)]
            for graph, known in zip(graphs, values, strict=True):
                known.append(graph.call_function(target, tuple(known[pick] for pick in picks)))
        for graph, known in zip(graphs, values, strict=True):
            graph.output(tuple(known[-3:]))
        gm, peer = GraphModule(nn.Module(), graphs[0]), torch.fx.GraphModule(nn.Module(), graphs[1])
        parts = partition(gm, lambda node: node.target is torch.add)
        x, y = torch.rand(2), torch.rand(2)
        torch.testing.assert_close(parts(x, y), gm(x, y), rtol=0, atol=0)
        support = create_op_support(lambda _, node: node.target is torch.add)
        fused = CapabilityBasedPartitioner(peer, support, allows_single_node_partition=True).partition_and_fuse()
        inside = sorted(name for names in islands(parts).values() for name in names)
        assert inside == sorted(node.name for node in gm.graph.nodes if node.target is torch.add)
        assert 1 < len(islands(parts)) <= len(islands(fused))
