"""Measure how the cost of passes grows with the graph, and compare with torch.fx where it has the pass.

Run: python benchmarks/passes.py [--rounds 3] [--largest 100000] [--peer 10000]
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import math
import statistics
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.fx
from compare import describe_machine, print_table
from torch import nn
from torch.fx.passes.dialect.common.cse_pass import CSEPass
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.operator_support import create_op_support
from torch.fx.passes.split_module import split_module as torch_fx_split_module

import featx
from featx import passes

_ATEN = torch.ops.aten


def chain(library: ModuleType, nodes: int) -> Any:
    """Build a chain of calls, a quarter of them dead."""
    graph = library.Graph()
    value = graph.placeholder("x")
    for index in range(nodes):
        call = graph.call_function(torch.neg if index % 2 else torch.relu, (value,))
        if index % 4:
            value = call
    graph.output(value)
    return library.GraphModule(nn.Module(), graph)


def with_writes(library: ModuleType, nodes: int) -> Any:
    """Build a chain in which every fourth call writes in place and every fourth draws random numbers."""
    graph = library.Graph()
    value = graph.placeholder("x")
    for _ in range(nodes // 4):
        drawn = graph.call_function(torch.rand_like, (value,))
        value = graph.call_function(torch.neg, (graph.call_method("add_", (value, 1)),))
        value = graph.call_function(torch.add, (value, drawn))
    graph.output(value)
    return library.GraphModule(nn.Module(), graph)


def repeated(library: ModuleType, nodes: int) -> Any:
    """Build a chain in which every other call computes what the one before it did."""
    graph = library.Graph()
    value = graph.placeholder("x")
    for _ in range(nodes // 3):
        pair = [graph.call_function(_ATEN.neg.default, (value,)) for _ in range(2)]
        value = graph.call_function(_ATEN.add.Tensor, tuple(pair))
    graph.output(value)
    return library.GraphModule(nn.Module(), graph)


def constants(library: ModuleType, nodes: int) -> Any:
    """Build a chain that adds values which are computed from a buffer: three of four calls are constant."""
    root = nn.Module()
    root.register_buffer("table", torch.ones(2))
    graph = library.Graph()
    value, table = graph.placeholder("x"), graph.get_attr("table")
    for index in range(nodes // 4):
        constant = graph.call_method("neg", (graph.call_function(torch.mul, (table, index)),))
        value = graph.call_function(torch.add, (value, graph.call_method("exp", (constant,))))
    graph.output(value)
    return library.GraphModule(root, graph)


def layers(library: ModuleType, nodes: int) -> Any:
    """Build a chain of functions with a small convolution, batch norm and dropout for each forty nodes."""
    root = nn.Module()
    graph = library.Graph()
    value = graph.placeholder("x")
    for index in range(nodes // 40):
        for name, layer in (("conv", nn.Conv1d(1, 1, 1)), ("norm", nn.BatchNorm1d(1)), ("drop", nn.Dropout())):
            root.add_module(f"{name}{index}", layer)
            value = graph.call_module(f"{name}{index}", (value,))
        for _ in range(37):
            value = graph.call_function(torch.relu, (value,))
    graph.output(value)
    return library.GraphModule(root.eval(), graph)


def split_in_hundreds(module: Any, split: Callable[..., Any]) -> None:
    """Make a child of each hundred nodes."""
    parts = {node: index // 100 for index, node in enumerate(module.graph.nodes)}
    split(module, None, parts.__getitem__)


def partition_with_torch_fx(module: Any) -> None:
    """Let torch.fx gather what is supported."""
    support = create_op_support(lambda _, node: node.target in (torch.relu, torch.add))
    CapabilityBasedPartitioner(module, support, allows_single_node_partition=True).partition_and_fuse()


@dataclasses.dataclass(frozen=True)
class Case:
    """A kind of graph, what featx does to it, and what torch.fx does."""

    name: str
    build: Callable[[ModuleType, int], Any]
    run: Callable[[Any], object]
    peer: Callable[[Any], object] | None = None


def extract_second_half(module: Any) -> None:
    """Extract what comes after the middle node."""
    nodes = [node for node in module.graph.nodes if node.users]
    passes.extract_subgraph(module, [nodes[len(nodes) // 2]], module.graph.output_node().args)


CASES = (
    Case("dead code", chain, passes.eliminate_dead_code, lambda module: module.graph.eliminate_dead_code()),
    Case("dead code, with writes", with_writes, passes.eliminate_dead_code),
    Case("common subexpressions", repeated, passes.eliminate_common_subexpressions, CSEPass()),
    Case("the same, with writes", with_writes, passes.eliminate_common_subexpressions),
    Case("constants", constants, passes.fold_constants),
    Case(
        "split, 100 nodes each",
        chain,
        lambda module: split_in_hundreds(module, passes.split_module),
        lambda module: split_in_hundreds(module, torch_fx_split_module),
    ),
    Case("the same, with writes", with_writes, lambda module: split_in_hundreds(module, passes.split_module)),
    Case(
        "partition, half supported",
        chain,
        lambda module: passes.partition(module, lambda node: node.target is torch.relu),
        partition_with_torch_fx,
    ),
    Case("the same, with writes", with_writes, lambda m: passes.partition(m, lambda node: node.target is torch.add)),
    Case("subgraph: second half", chain, extract_second_half),
    Case("normalize arguments", constants, passes.normalize_arguments),
    Case("fuse conv and norm", layers, passes.fuse_conv_bn),
    Case("remove dropout", layers, passes.remove_dropout),
)


def measure(case: Case, library: ModuleType, nodes: int, *, collector: bool) -> float:
    """Return the seconds of process CPU time that a pass takes on a fresh graph."""
    module = case.build(library, nodes)
    run = case.run if library is featx else case.peer
    assert run is not None
    gc.collect()
    if not collector:
        gc.disable()
    start = time.process_time()
    run(module)
    seconds = time.process_time() - start
    gc.enable()
    return seconds


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--largest", type=int, default=100_000)
    parser.add_argument("--peer", type=int, default=10_000, help="the size at which torch.fx is measured too")
    parser.add_argument("--only", default="", help="a part of the names of passes to measure")
    arguments = parser.parse_args()
    print(describe_machine() + "; us a node\n")
    sizes = (arguments.largest // 100, arguments.largest // 10, arguments.largest)
    rows: list[list[str]] = []
    for case in CASES:
        if arguments.only not in case.name:
            continue
        times = [[measure(case, featx, size, collector=False) for size in sizes] for _ in range(arguments.rounds)]
        off = [statistics.median(column) for column in zip(*times, strict=True)]
        ours = [measure(case, featx, arguments.peer, collector=True) for _ in range(arguments.rounds)]
        cells = [f"{statistics.median(ours) / arguments.peer * 1e6:.2f}", "", ""]
        if case.peer is not None:
            theirs = [measure(case, torch.fx, arguments.peer, collector=True) for _ in range(arguments.rounds)]
            cells[1] = f"{statistics.median(theirs) / arguments.peer * 1e6:.2f}"
            cells[2] = f"{statistics.median(ours) / statistics.median(theirs):.2f}"
        exponent = math.log10(off[2] / off[0]) / 2
        rows.append(
            [case.name, *(f"{s / n * 1e6:.2f}" for s, n in zip(off, sizes, strict=True)), f"{exponent:.2f}", *cells]
        )
    headings = ["pass", *(f"{size:.0e}" for size in sizes), "exponent"]
    print_table([*headings, f"collector on, {arguments.peer:.0e}", "torch.fx", "ratio"], rows)


if __name__ == "__main__":
    main()
