"""Take modules that no graph needs any more out of a graph module."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from featx.containers import is_of_graph_module
from featx.ir.graph import Graph
from featx.ir.paths import parents_of
from featx.module import GraphModule


def remove_unused_modules(gm: GraphModule, paths: Iterable[str]) -> None:
    """Remove the modules at `paths` that no graph of `gm` calls or reads from, and containers that this empties.

    Only what belongs to `gm` alone is edited: a module inside one of the user's stays, and copies of `gm` keep theirs.
    O(nodes + paths * depth).
    """
    graphs = [value for value in gm.__dict__.values() if isinstance(value, Graph)]
    targets = {node.target for graph in graphs for node in graph.nodes if node.op in ("call_module", "get_attr")}
    used = prefixes(targets)
    for path in dict.fromkeys(paths):
        if targets.isdisjoint(prefixes([path])):
            _remove(gm, path, used)


def prefixes(paths: Iterable[str]) -> set[str]:
    """Return the paths and all that they lie below."""
    return {prefix for path in paths for prefix in (path, *parents_of(path))}


def _remove(gm: GraphModule, path: str, used: set[str]) -> None:
    owners: list[nn.Module] = [gm]
    *parents, _ = names = path.split(".")
    for part in parents:
        child = owners[-1]._modules.get(part)
        if child is None or not is_of_graph_module(child):
            return
        owners.append(child)
    for depth in range(len(names), 0, -1):
        if ".".join(names[:depth]) in used:
            return
        owner = owners[depth - 1]
        owner._modules.pop(names[depth - 1], None)
        if owner._modules or owner._parameters or owner._buffers:
            return
