"""Gather the nodes that a backend supports into as few submodules as their order allows."""

from __future__ import annotations

from collections.abc import Callable

from featx.ir.node import Node
from featx.module import GraphModule, check_graph_module
from featx.passes.accesses import Accesses
from featx.passes.submodules import ChildForm, Regrouping


def partition(gm: GraphModule, is_supported: Callable[[Node], bool], min_nodes: int = 1) -> GraphModule:
    """Return a module that computes what `gm` does, with the supported nodes in children `submod_0`, `submod_1`...

    `is_supported` is asked about each call; a read of a parameter or buffer goes to where it is used. There are as few
    children as can be: no two of them could be one without running a node too early or too late, with regard to values,
    writes into shared memory, random draws and switches of modes. A child may hold nodes that have nothing to do with
    each other. Those with fewer than `min_nodes` calls stay in the outer graph. `gm` is not changed; submodules and
    tensors are shared. O(nodes * log(nodes) + edges).
    """
    accesses = Accesses(check_graph_module(gm))
    names: dict[Node, str] = {}
    number = 0
    for group in supported_groups(gm, is_supported, accesses):
        if len(group) >= min_nodes:
            while hasattr(gm, f"submod_{number}"):
                number += 1
            names.update(dict.fromkeys(group, f"submod_{number}"))
            number += 1
    return Regrouping(gm, names, accesses, ChildForm(sets_modes=False)).build()


def supported_groups(gm: GraphModule, is_supported: Callable[[Node], bool], accesses: Accesses) -> list[list[Node]]:
    """Return the groups of supported calls that `partition` puts into children, in the order in which they run."""
    inner = [
        node for node in gm.graph.nodes if node.op not in ("placeholder", "output") and not accesses.is_fixed_read(node)
    ]
    supported = {
        node
        for node in inner
        if node.op != "get_attr" and not accesses.effects.of(node).changes_global_state and is_supported(node)
    }
    # How many groups, with other nodes between them, run one after the other up to here: one group for each number.
    levels: dict[Node, int] = {node: int(node in supported) for node in inner}
    for first, second in accesses.dependencies(inner, in_modes=True):
        step = int(second in supported and first not in supported)
        levels[second] = max(levels[second], levels[first] + step)
    groups: dict[int, list[Node]] = {}
    for node in inner:
        if node in supported:
            groups.setdefault(levels[node], []).append(node)
    return [groups[level] for level in sorted(groups)]
