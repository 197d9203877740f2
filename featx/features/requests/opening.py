"""Decide which modules of a model an extractor looks into: those that a requested value lies inside, and no other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from featx.ir.graph import Graph
from featx.ir.paths import parents_of


def modules_to_open(paths: Collection[str], names: Iterable[str]) -> frozenset[str]:
    """Return the paths of the modules that must be traced through so that each of `names` has a node.

    The value of a module needs the modules around it, any other value the module that computes it too. The model itself
    has the path "". O(names * depth).

    Args:
        paths: those of all modules, in a set or a dict.
        names: what is requested.
    """
    opened = {""}
    for name in names:
        around = parents_of(name)
        while name not in paths and around and around[0] not in paths:
            around.pop(0)
        opened.update(around)
    return frozenset(opened)


def names_match_full_trace(graph: Graph, names: Iterable[str], ran_inside: Collection[str]) -> bool:
    """Say whether each of `names` means in `graph` what it means in the graph of a trace that opens all modules.

    Nodes are numbered in the module that makes them, which does the same whatever it calls is opened or not. But a
    module that is kept whole hides what runs inside it, calls of the requested modules too, and where it returns
    several values, those that are taken out of them are nodes that the other graph may not have. O(nodes + names).

    Args:
        graph: a trace with some modules kept whole.
        names: what is requested.
        ran_inside: the paths of modules to open, or requested, that ran inside others.
    """
    if ran_inside:
        return False
    calls: Counter[object] = Counter()
    with_parts: set[tuple[str, str]] = set()
    for node in graph.nodes:
        if node.meta.get("is_opaque_module"):
            calls[node.target] += 1
        elif node.meta.get("is_part_of_opaque"):
            with_parts.add(_owner_and_stem(node.meta["qualified_name"]))
    return all(calls[name] < 2 and _owner_and_stem(name) not in with_parts for name in names)


def _owner_and_stem(name: str) -> tuple[str, str]:
    owner, _, last = name.rpartition(".")
    stem, _, number = last.rpartition("_")
    return owner, stem if number.isdigit() else last
