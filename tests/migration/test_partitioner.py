"""CapabilityBasedPartitioner proposes what torch.fx's does, on random graphs of calls without effects."""

from __future__ import annotations

import operator
import random
from typing import Any

import pytest
import torch
import torch.fx
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner as Peer
from torch.fx.passes.operator_support import OperatorSupportBase as PeerSupport

import featx
from featx.errors import PassError
from featx.migration.operator_support import create_op_support
from featx.migration.partitioner import CapabilityBasedPartitioner, Partition

FUNCTIONS = (torch.sin, torch.cos, torch.tanh, torch.exp)


class Supported(PeerSupport):
    def __init__(self, names: set[str]) -> None:
        self.names = names

    def is_node_supported(self, submodules: Any, node: torch.fx.Node) -> bool:
        return node.name in self.names


def random_module(seed: int, size: int) -> tuple[torch.fx.GraphModule, set[str]]:
    """Return a module of random calls, among them some that give tuples, and the names of the supported ones."""
    choose = random.Random(seed)
    graph = torch.fx.Graph()
    values = [graph.placeholder(f"x{number}") for number in range(choose.randint(1, 3))]
    for _ in range(size):
        kind = choose.random()
        if kind < 0.15:
            parts = graph.call_function(torch.chunk, (choose.choice(values[-6:]), 2))
            values += [graph.call_function(operator.getitem, (parts, number)) for number in range(2)]
        elif kind < 0.6:
            values.append(graph.call_function(choose.choice(FUNCTIONS), (choose.choice(values[-6:]),)))
        else:
            values.append(graph.call_function(torch.add, (choose.choice(values[-6:]), choose.choice(values))))
    graph.output(values[-1])
    share = choose.choice((0.3, 0.6, 0.9))
    names = {node.name for node in graph.nodes if node.op == "call_function" and choose.random() < share}
    return torch.fx.GraphModule(torch.nn.Module(), graph), names


OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"allows_single_node_partition": True},
    {"non_compute_ops": ["torch.sin", "torch.add"]},
    {"allowed_single_node_partition_ops": ["torch.cos"]},
)


def proposed(partitioner: Any, *, trims: bool) -> list[tuple[list[str], list[int]]]:
    partitions = partitioner.propose_partitions()
    if trims:
        partitioner.remove_bookend_non_compute_ops(partitions)
    return [([node.name for node in part.nodes], list(part.nodes.values())) for part in partitions]


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "single", "non-compute", "allowed"])
@pytest.mark.parametrize("skips", [False, True], ids=["all", "vertical"])
def test_partitions_are_those_of_torch_fx(options: dict[str, Any], skips: bool) -> None:
    peer_options: dict[str, Any] = {"skip_horizontal_fusion": True} if skips else {}
    if skips and "skip_horizontal_fusion" not in Peer.__init__.__annotations__:
        pytest.skip("this torch has no skip_horizontal_fusion")
    for seed in range(60):
        theirs, names = random_module(seed, 5 + seed % 30)
        ours = featx.from_torch_fx(theirs)
        support = create_op_support(lambda _, node, names=names: node.name in names)
        found = CapabilityBasedPartitioner(ours, support, skip_horizontal_fusion=skips, **options)
        wanted = Peer(theirs, Supported(names), **options, **peer_options)
        for trims in (False, True):
            assert proposed(found, trims=trims) == proposed(wanted, trims=trims), (seed, trims)


def test_writes_count_as_dependencies() -> None:
    def function(x: Any) -> Any:
        first = torch.sin(x)
        x.add_(1)  # which is not supported, and must run between the two
        return torch.cos(first) + torch.sin(x)

    module = featx.symbolic_trace(function)
    support = create_op_support(lambda _, node: node.op == "call_function")
    partitioner = CapabilityBasedPartitioner(module, support, allows_single_node_partition=True)
    assert torch.equal(partitioner.partition_and_fuse()(torch.ones(2)), function(torch.ones(2)))
    assert [part.size() for part in partitioner.propose_partitions()] == [3, 1]


@pytest.mark.slow
def test_parts_compute_what_the_module_does() -> None:
    for seed in range(20):
        theirs, names = random_module(seed, 20)
        ours = featx.from_torch_fx(theirs)
        support = create_op_support(lambda _, node, names=names: node.name in names)
        fused = CapabilityBasedPartitioner(ours, support, allows_single_node_partition=True).partition_and_fuse()
        inputs = [torch.ones(2**12) for node in theirs.graph.nodes if node.op == "placeholder"]
        try:
            expected = theirs(*inputs)
        except RuntimeError:
            continue  # lengths that do not fit
        torch.testing.assert_close(fused(*inputs), expected, rtol=0, atol=0, equal_nan=True)


def test_partition_with_another_number_of_orders_is_refused() -> None:
    node = featx.Graph().placeholder("x")
    assert Partition(nodes=[node], node_orders=[3]).nodes == {node: 3}
    with pytest.raises(PassError, match="1 nodes got 2 node_orders"):
        Partition(nodes=[node], node_orders=[3, 4])
