"""Compare replace_pattern with torch.fx's, and measure how its cost grows with the graph.

Run: python benchmarks/rewrite.py [--rounds 3] [--largest 100000] [--peer 10000]
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

import featx

_CYCLE = (torch.relu, torch.neg, torch.sigmoid, torch.tanh)


def chain(library: ModuleType, nodes: int) -> Any:
    """Build a chain of calls of four functions in turn."""
    graph = library.Graph()
    value = graph.placeholder("x")
    for index in range(nodes):
        value = graph.call_function(_CYCLE[index % 4], (value,))
    graph.output(value)
    return library.GraphModule(nn.Module(), graph)


def twice_read(library: ModuleType, nodes: int) -> Any:
    """Build a chain in which every fourth value is read twice."""
    graph = library.Graph()
    value = graph.placeholder("x")
    for _ in range(nodes // 4):
        value = graph.call_function(torch.neg, (graph.call_function(torch.relu, (value,)),))
        other = graph.call_function(torch.sigmoid, (value,))
        value = graph.call_function(torch.add, (value, other))
    graph.output(value)
    return library.GraphModule(nn.Module(), graph)


def in_place(library: ModuleType, nodes: int) -> Any:
    """Build a chain in which every fourth call writes, and no match is a run of nodes."""
    graph = library.Graph()
    value = graph.placeholder("x")
    for _ in range(nodes // 4):
        first = graph.call_function(torch.relu, (value,))
        other = graph.call_method("add_", (graph.call_function(torch.sigmoid, (value,)), 1))
        value = graph.call_method("sub", (graph.call_function(torch.neg, (first,)), other))
    graph.output(value)
    return library.GraphModule(nn.Module(), graph)


def fan(library: ModuleType, nodes: int) -> Any:
    """Build pairs of calls on one input, which the output returns all."""
    graph = library.Graph()
    value = graph.placeholder("x")
    results: list[Any] = []
    for _ in range(nodes // 4):
        for first, second in (_CYCLE[:2], _CYCLE[2:]):
            results.append(graph.call_function(second, (graph.call_function(first, (value,)),)))
    graph.output(tuple(results))
    return library.GraphModule(nn.Module(), graph)


def two_calls(x: Any) -> Any:
    """The pattern of two nodes."""
    return torch.neg(torch.relu(x))


def long_chain(x: Any) -> Any:
    """The pattern of 256 nodes."""
    for index in range(256):
        x = _CYCLE[index % 4](x)
    return x


def one_call(x: Any) -> Any:
    """What is put in the place of either pattern."""
    return torch.abs(x)


@dataclasses.dataclass(frozen=True)
class Case:
    """A kind of graph, and what is looked for in it."""

    name: str
    build: Callable[[ModuleType, int], Any]
    pattern: Callable[[Any], Any]


CASES = (
    Case("chain, 2 nodes", chain, two_calls),
    Case("matches with two readers", twice_read, two_calls),
    Case("with in-place calls between", in_place, two_calls),
    Case("one input, one reader of all", fan, two_calls),
    Case("chain, 256 nodes", chain, long_chain),
)


def measure(case: Case, library: ModuleType, nodes: int, *, collector: bool, recompile: bool) -> float:
    """Return the seconds of process CPU time that one rewriting of a fresh graph takes."""
    module = case.build(library, nodes)
    replace = featx.replace_pattern if library is featx else torch.fx.replace_pattern
    gc.collect()
    if not collector:
        gc.disable()
    start = time.process_time()
    matches = replace(module, case.pattern, one_call)
    if recompile:
        module.recompile()
    seconds = time.process_time() - start
    gc.enable()
    assert matches
    return seconds


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--largest", type=int, default=100_000)
    parser.add_argument("--peer", type=int, default=10_000, help="the size at which torch.fx is measured too")
    arguments = parser.parse_args()
    print(describe_machine() + "; seconds\n")
    sizes = (arguments.peer // 10, arguments.peer, arguments.largest)
    rows: list[list[str]] = []
    for case in CASES:
        times: dict[tuple[str, int], list[float]] = {}
        for _ in range(arguments.rounds):
            for size in sizes:
                for name, collector, recompile in (("plain", True, False), ("off", False, False)):
                    seconds = measure(case, featx, size, collector=collector, recompile=recompile)
                    times.setdefault((name, size), []).append(seconds)
            for size in sizes[:2]:
                seconds = measure(case, featx, size, collector=True, recompile=True)
                times.setdefault(("recompiled", size), []).append(seconds)
                seconds = measure(case, torch.fx, size, collector=True, recompile=False)
                times.setdefault(("peer", size), []).append(seconds)
        found = {key: statistics.median(values) for key, values in times.items()}
        rows.append(row_of(case, found, sizes))
    headings = ["graph and pattern", *(f"featx, {size:.0e}" for size in sizes)]
    headings += [f"torch.fx, {size:.0e}" for size in sizes[:2]]
    print_table([*headings, "ratio", "with recompile", "exponent", "collector off", "torch.fx's"], rows)


def row_of(case: Case, found: dict[tuple[str, int], float], sizes: tuple[int, int, int]) -> list[str]:
    """Turn the medians of a case into a row of the table."""
    small, middle, large = sizes
    step = math.log10(large / middle)
    return [
        case.name,
        *(f"{found['plain', size]:.3f}" for size in sizes),
        *(f"{found['peer', size]:.3f}" for size in sizes[:2]),
        f"{found['plain', middle] / found['peer', middle]:.3f}",
        f"{found['recompiled', middle] / found['peer', middle]:.3f}",
        f"{math.log10(found['plain', large] / found['plain', middle]) / step:.2f}",
        f"{math.log10(found['off', large] / found['off', middle]) / step:.2f}",
        f"{math.log10(found['peer', middle] / found['peer', small]) / math.log10(middle / small):.2f}",
    ]


if __name__ == "__main__":
    main()
