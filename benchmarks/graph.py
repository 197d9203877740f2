"""Compare graph operations with torch.fx, and measure how their cost and memory grow with the graph.

python benchmarks/graph.py [--nodes 100000] [--rounds 5]
python benchmarks/graph.py --growth [--largest 1000000]   featx alone, without the garbage collector
python benchmarks/graph.py --memory [--nodes 100000]      bytes a node, each library in a process of its own
"""

from __future__ import annotations

import argparse
import copy
import gc
import math
import pickle
import resource
import statistics
import subprocess
import sys
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
from featx import passes


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


def replace_uses(graph: featx.Graph, library: ModuleType) -> None:
    """Let the readers of every node read its input instead."""
    for node in graph.nodes:
        if node.op == "call_function":
            node.replace_all_uses_with(node.args[0])


def in_module(graph: featx.Graph, run: Callable[[featx.GraphModule], object]) -> None:
    """Do something with a module that runs a graph."""
    run(featx.GraphModule(nn.Module(), graph))


def split_in_thousands(module: featx.GraphModule) -> None:
    """Make a child of each thousand nodes."""
    parts = {node: index // 1000 for index, node in enumerate(module.graph.nodes)}
    passes.split_module(module, None, parts.__getitem__)


def twice(x: torch.Tensor) -> torch.Tensor:
    """The pattern that is replaced."""
    return torch.relu(torch.relu(x))


def negated(x: torch.Tensor) -> torch.Tensor:
    """What is put in its place."""
    return torch.neg(x)


def replace_inputs(graph: featx.Graph, library: ModuleType) -> None:
    """Replace each input of the call that reads them all, one after the other."""
    *inputs, other, call, _ = graph.nodes
    for node in inputs:
        call.replace_input_with(node, other)


def replace_users(graph: featx.Graph, library: ModuleType) -> None:
    """Let all readers of one node read another one."""
    first, second, *_ = graph.nodes
    first.replace_all_uses_with(second)


def find(graph: featx.Graph, library: ModuleType) -> None:
    """Find the calls of a function, for the first time in this graph."""
    graph.find_nodes(op="call_function", target=torch.relu)


def of_one_call(library: ModuleType, nodes: int) -> featx.Graph:
    """Build a call that reads many inputs."""
    graph = library.Graph()
    inputs = [graph.placeholder(f"x{index}") for index in range(nodes + 1)]
    graph.output(graph.call_function(print, tuple(inputs[:-1])))
    return graph


def of_many_readers(library: ModuleType, nodes: int) -> featx.Graph:
    """Build many calls that read one input."""
    graph = library.Graph()
    x, _ = graph.placeholder("x"), graph.placeholder("y")
    graph.output(tuple([graph.call_function(torch.relu, (x,)) for _ in range(nodes)]))
    return graph


def live_chain(library: ModuleType, nodes: int) -> featx.Graph:
    """Build a chain of calls, none of which is dead."""
    graph = library.Graph()
    value = graph.placeholder("x")
    for _ in range(nodes):
        value = graph.call_function(torch.relu, (value,))
    graph.output(value)
    return graph


# Operations on graphs without an owner whose cost is that of one node with many neighbours, or that do nothing.
WIDE: tuple[tuple[str, Callable[[ModuleType, int], featx.Graph], Callable[[featx.Graph, ModuleType], object]], ...] = (
    ("replace_all_uses_with, N users", of_many_readers, replace_users),
    ("replace_input_with, each of N inputs", of_one_call, replace_inputs),
    ("find_nodes, the first time", live_chain, find),
    ("eliminate_dead_code, nothing dead", live_chain, eliminate),
    ("lint", live_chain, lambda graph, library: graph.lint()),
)


def measure_wide(rounds: int) -> list[list[str]]:
    """Return a row for each of these operations: microseconds a node at 1,000, the ratio, and featx's growth to 1e4."""
    rows: list[list[str]] = []
    for name, build, operation in WIDE:
        times: dict[tuple[ModuleType, int], list[float]] = {}
        for _ in range(rounds):
            for library, nodes in ((featx, 1000), (torch.fx, 1000), (featx, 10_000)):
                graph = build(library, nodes)
                gc.collect()
                start = time.process_time()
                operation(graph, library)
                times.setdefault((library, nodes), []).append((time.process_time() - start) / nodes * 1e6)
        ours, theirs, large = (statistics.median(each) for each in times.values())
        exponent = 1 + math.log10(large / ours)
        rows.append([name, f"{ours:.2f}", f"{theirs:.2f}", f"{ours / theirs:.2f}", f"{exponent:.2f}"])
    return rows


# Name, what it does to a graph, and whether it leaves the graph as it was.
OPERATIONS: tuple[tuple[str, Callable[[featx.Graph, ModuleType], object], bool], ...] = (
    # First, on memory that building and freeing graphs has not left in pieces.
    ("iterate", iterate, True),
    ("compare", compare_nodes, True),
    ("insert", insert, False),
    ("erase", erase, False),
    ("replace_all_uses", replace_uses, False),
    ("eliminate_dead_code", eliminate, False),
    ("lint", lambda graph, library: graph.lint(), True),
    ("str", lambda graph, library: str(graph), True),
    ("python_code", lambda graph, library: graph.python_code("self"), True),
    ("deepcopy", lambda graph, library: copy.deepcopy(graph), True),
)
# What torch.fx cannot do, or not at this size: RecursionError, or time that grows with the square.
OWN_OPERATIONS: tuple[tuple[str, Callable[[featx.Graph, ModuleType], object], bool], ...] = (
    ("pickle", lambda graph, library: pickle.loads(pickle.dumps(graph)), True),
    ("cse", lambda graph, library: in_module(graph, passes.eliminate_common_subexpressions), False),
    (
        "replace_pattern",
        lambda graph, library: in_module(graph, lambda m: featx.replace_pattern(m, twice, negated)),
        False,
    ),
    ("split", lambda graph, library: in_module(graph, split_in_thousands), True),
    ("interpret", lambda graph, library: in_module(graph, lambda m: featx.Interpreter(m).run(torch.ones(1))), True),
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
        times = sorted(self.times[1:])
        return times[len(times) // 2]


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


def grow(largest: int, rounds: int) -> list[list[str]]:
    """Return a row for each operation: microseconds a node at each size, and the exponent of the growth."""
    sizes = [10**power for power in range(3, round(math.log10(largest)) + 1)]
    rows: list[list[str]] = []
    operations = (
        *OPERATIONS,
        *OWN_OPERATIONS,
        ("create", lambda graph, library: chain(library, len(graph.nodes)), True),
    )
    for name, operation, _ in operations:
        costs: list[float] = []
        for size in sizes:
            measured = Measured(featx, size, operation, reuse=False)
            # Small graphs are over in no time, so that more runs are needed, and the largest take long.
            for _ in range(max(2, min(rounds, 1_000_000 // size))):
                gc.collect()
                gc.disable()
                measured()
                gc.enable()
            costs.append(measured.median / size * 1e6)
        exponent = 1 + math.log10(costs[-1] / costs[0]) / (len(sizes) - 1)
        rows.append([name, *(f"{cost:.2f}" for cost in costs), f"{exponent:.2f}"])
        print(f"{name} done", file=sys.stderr, flush=True)
    return [["operation", *(f"{size:.0e}" for size in sizes), "exponent"], *rows]


def resident(library: ModuleType, nodes: int) -> float:
    """Return how many bytes a node of a chain keeps resident; for a process that has done nothing else."""
    chain(library, 1000)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    graph = chain(library, nodes)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return (after - before) * 1024 / len(graph.nodes)


def compare_memory(nodes: int) -> list[str]:
    """Return bytes a node of both libraries, and the ratio."""
    found = [
        float(subprocess.run([sys.executable, __file__, "--resident", name, "--nodes", str(nodes)],
                             check=True, capture_output=True, text=True).stdout)
        for name in ("featx", "torch.fx")
    ]  # fmt: skip
    return [f"{nodes:.0e}", *(f"{size:.0f}" for size in found), f"{found[0] / found[1]:.2f}"]


def main() -> None:
    """Print the comparison, the growth, or the memory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--growth", action="store_true")
    parser.add_argument("--largest", type=int, default=1_000_000)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--resident", choices=["featx", "torch.fx"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.resident:
        print(resident(featx if arguments.resident == "featx" else torch.fx, arguments.nodes))
        return
    if arguments.memory:
        print_table(["nodes", "featx", "torch.fx", "ratio"], [compare_memory(arguments.nodes)])
        return
    print(describe_machine() + "; us a node\n")
    if arguments.growth:
        headings, *rows = grow(arguments.largest, arguments.rounds)
        print_table(headings, rows)
        return
    rows = [
        [name, f"{ours:.2f}", f"{theirs:.2f}", f"{ours / theirs:.2f}"]
        for name, ours, theirs in measure(arguments.nodes, arguments.rounds)
    ]
    print_table(["operation", "featx", "torch.fx", "ratio"], rows)
    print("\nat 1,000 nodes, without an owner; the exponent is featx's growth from 1e3 to 1e4\n")
    print_table(["operation", "featx", "torch.fx", "ratio", "exponent"], measure_wide(arguments.rounds))


if __name__ == "__main__":
    main()
