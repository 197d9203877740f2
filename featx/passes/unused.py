"""Take modules that no graph needs any more out of a graph module."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

from torch import nn

from featx.ir.graph import Graph
from featx.module import GraphModule


def remove_unused_modules(gm: GraphModule, paths: Iterable[str]) -> None:
    """Remove the modules at `paths` from `gm`, but for those that a graph of `gm` calls or reads from.

    Only what belongs to `gm` alone is edited: a module that is inside another one of the user stays, and copies of `gm`
    keep theirs. O(nodes + paths * depth).
    """
    graphs = [value for value in gm.__dict__.values() if isinstance(value, Graph)]
    targets = {node.target for graph in graphs for node in graph.nodes if node.op in ("call_module", "get_attr")}
    on_the_way = {path for target in targets for path in _prefixes(target)}
    own: set[nn.Module] = {gm}
    for path in paths:
        if path not in on_the_way and targets.isdisjoint(_prefixes(path)):
            _remove(gm, path, own)


def _remove(gm: GraphModule, path: str, own: set[nn.Module]) -> None:
    owner: nn.Module = gm
    *parents, name = path.split(".")
    for part in parents:
        child = owner._modules.get(part)
        if child is None or type(child) is not nn.Module:
            return
        if child not in own:
            # A shallow copy of `gm` has this container too.
            twin = nn.Module()
            twin.__dict__.update(child.__dict__)
            twin.__dict__["_modules"] = child._modules.copy()
            owner._modules[part] = child = twin
            own.add(twin)
        owner = child
    owner._modules.pop(name, None)


def _prefixes(path: str) -> Iterator[str]:
    return itertools.accumulate(path.split("."), lambda start, part: f"{start}.{part}")
