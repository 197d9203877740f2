"""Compare graph operations with torch.fx, and measure how their cost grows with the graph.

Run: python benchmarks/graph.py [--nodes 100000] [--rounds 5] [--growth]
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from itertools import pairwise
from types import ModuleType

import torch
import torch.fx
from compare import describe_machine, medians, print_table
from torch import nn
from torch.fx.passes.shape_prop import ShapeProp

import featx


def chain(library: ModuleType, nodes: int) -> featx.Graph:
    """Build a chain of calls, a quarter of them dead."""
    graph = library.Graph()
    value = graph.placeholder("x")
    for index in range(nodes):
        call = graph.call_function(torch.relu, (value,))
        if index % 4:
            value = call
    graph.output(value)
    return graph


def insert(graph: featx.Graph, library: ModuleType) -> None:
    """Insert a node before every tenth node."""
    anchors = list(graph.nodes)[1::10]
    for anchor in anchors:
        with graph.inserting_before(anchor):
            graph.call_method("neg", (anchor.args[0],) if anchor.args else ())


def erase(graph: featx.Graph, library: ModuleType) -> None:
    """Erase every node, from the end."""
    for node in reversed(graph.nodes):
        graph.erase_node(node)


def eliminate(graph: featx.Graph, library: ModuleType) -> None:
    """Remove dead code."""
    graph.eliminate_dead_code()


def iterate(graph: featx.Graph, library: ModuleType) -> None:
    """Visit every node."""
    for _ in graph.nodes:
        pass


def compare_nodes(graph: featx.Graph, library: ModuleType) -> None:
    """Ask for each pair of neighbours which comes first."""
    nodes = list(graph.nodes)
    for first, second in pairwise(nodes):
        _ = first < second


def propagating(library: ModuleType, nodes: int) -> Callable[[], object]:
    """Return what propagates the shape of a tensor on the meta device through a chain."""
    module = library.GraphModule(nn.Module(), chain(library, nodes))
    shape_prop = featx.ShapeProp if library is featx else ShapeProp
    value = torch.empty(4, 4, device="meta")
    return lambda: shape_prop(module).propagate(value)


# Name, what it does to a graph, and whether it leaves the graph as it was.
OPERATIONS: tuple[tuple[str, Callable[[featx.Graph, ModuleType], object], bool], ...] = (
    # First, on memory that building and freeing graphs has not left in pieces.
    ("iterate", iterate, True),
    ("compare", compare_nodes, True),
    ("insert", insert, False),
    ("erase", erase, False),
    ("eliminate_dead_code", eliminate, False),
    ("lint", lambda graph, library: graph.lint(), True),
    ("str", lambda graph, library: str(graph), True),
    ("python_code", lambda graph, library: graph.python_code("self"), True),
    ("deepcopy", lambda graph, library: copy.deepcopy(graph), True),
)


class Measured:
    """Runs one operation on fresh or reused graphs of one library, and keeps what building them took apart."""

    def __init__(self, library: ModuleType, nodes: int, operation: Callable[..., object], reuse: bool) -> None:
        self._library, self._nodes, self._operation = library, nodes, operation
        self._graph = chain(library, nodes) if reuse else None
        self.times: list[float] = []

    def __call__(self) -> None:  # noqa: D102 - magic
        graph = self._graph if self._graph is not None else chain(self._library, self._nodes)
        # torch.fx's dead-code removal asks the owner about modules; there are none here.
        owner = nn.Module()
        if self._library is torch.fx:
            graph.owning_module = owner
        start = time.process_time()
        self._operation(graph, self._library)
        self.times.append(time.process_time() - start)

    @property
    def median(self) -> float:
        """The median time of the operation alone, in seconds."""
        return sorted(self.times[1:])[(len(self.times) - 1) // 2]


def measure(nodes: int, rounds: int, *, collector: bool = True) -> list[tuple[str, float, float]]:
    """Return, for each operation, its name and the time of featx and of torch.fx, in microseconds a node."""
    libraries = (featx, torch.fx)
    results: list[tuple[str, float, float]] = []
    for name, operation, reuse in OPERATIONS:
        pair = [Measured(library, nodes, operation, reuse) for library in libraries]
        medians(*pair, rounds, collector=collector)
        results.append((name, pair[0].median / nodes * 1e6, pair[1].median / nodes * 1e6))
    create = medians(
        *(lambda library=library: chain(library, nodes) for library in libraries), rounds, collector=collector
    )
    shapes = medians(*(propagating(library, nodes) for library in libraries), rounds, collector=collector)
    return [
        *results,
        *((name, ours / nodes * 1e6, theirs / nodes * 1e6)
          for name, (ours, theirs) in (("create", create), ("ShapeProp, meta", shapes))),
    ]  # fmt: skip


def main() -> None:
    """Print the comparison, or the growth."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--growth", action="store_true", help="featx alone at 1e3, 1e4 and 1e5 nodes, collector off")
    arguments = parser.parse_args()
    print(describe_machine() + "; us a node\n")
    if arguments.growth:
        sizes = (1_000, 10_000, 100_000)
        columns = [measure(size, arguments.rounds, collector=False) for size in sizes]
        rows = []
        for results in zip(*columns, strict=True):
            costs = [cost for _, cost, _ in results]
            rows.append([results[0][0], *(f"{cost:.2f}" for cost in costs), f"{max(costs) / min(costs):.2f}"])
        print_table(["operation", *(f"{size:.0e}" for size in sizes), "largest / smallest"], rows)
        return
    rows = [
        [name, f"{ours:.2f}", f"{theirs:.2f}", f"{ours / theirs:.2f}"]
        for name, ours, theirs in measure(arguments.nodes, arguments.rounds)
    ]
    print_table(["operation", "featx", "torch.fx", "ratio"], rows)


if __name__ == "__main__":
    main()
