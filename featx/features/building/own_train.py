"""Modules whose `train` does more than to set flags, in extractors that look into them and do not call it."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torch import nn

from featx.ir.graph import Graph
from featx.ir.modules import walk_modules
from featx.tracing.replica.replica import only_sets_flags, replica_of


def looked_into(graphs: Iterable[Graph]) -> frozenset[str]:
    """Return the paths of the modules that graphs look into: around their nodes, and not called whole. O(nodes)."""
    nodes = [node for graph in graphs for node in graph.nodes]
    whole = {node.target for node in nodes if node.op == "call_module"}
    return frozenset(path for node in nodes for path in node.meta.get("nn_module_stack", {}) if path not in whole)


def opened_writer(model: nn.Module, opened: Collection[str]) -> str | None:
    """Return the path of a module among `opened` whose own `train` writes tensors when the mode changes, if any.

    As layers do that merge an update into their weight for eval mode. Of several that are inside of one another, the
    innermost is the one that writes. O(modules), and a replica of each module that has a `train` of its own.
    """
    own = {path: module for path, module in walk_modules(model) if not only_sets_flags(module)}
    if not own or not _writes(model):
        return None
    writing = [path for path, module in own.items() if _writes(module)]
    innermost = [path for path in writing if not any(_is_inside(other, path) for other in writing)]
    return next((path for path in innermost if not path or path in opened), None)


def _writes(module: nn.Module) -> bool:
    return not replica_of(module, not module.training).shares_parameters


def _is_inside(path: str, other: str) -> bool:
    return path != other and (not other or path.startswith(f"{other}."))
