"""Cut a graph down to what chosen values depend on, and return those values as they were when they were computed."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from featx.errors import ForeignNodeError
from featx.features.building.case_state import note_state
from featx.features.building.liveness import Liveness
from featx.features.building.overwrites import ClonesAfter, Overwrites
from featx.ir.apart import later_of, returned_of
from featx.ir.graph import Graph
from featx.ir.names import shown_name
from featx.ir.node import Node
from featx.tracing.guards.versions import check_version, version_of
from featx.tree import clone_tensors


def prune(
    graph: Graph, requested: Mapping[str, Node], root: nn.Module, read_elsewhere: frozenset[int] = frozenset()
) -> Graph:
    """Copy the part of `graph` that `requested` depends on, with an output that returns them as a dict by key.

    Nodes after the last requested one are removed. Calls that write into a value that is read later are kept even if
    nothing reads their result. Also kept are writes into state of the model that the kept part reads, random draws
    before a kept one (they advance the generator), and checks of the form of kept values. All inputs stay.
    `graph` is not changed. O(nodes + edges).

    Where a kept call overwrites a requested value later, there are two cases. If no other live value shares its memory,
    the value itself is returned and later nodes use a clone, so that gradients flow through the returned value;
    where another one may share its memory for other inputs alone, that is decided when the graph runs. Else
    the clone is returned; and if only nodes on the value itself read its memory before the overwriting call, these read
    the clone too, and `copy_` writes it back just before that call.

    Args:
        graph: a traced graph of `root`.
        requested: what to return, by key.
        root: the model, in the mode in which it was traced.
        read_elsewhere: ids of tensors of the model that another graph of it reads: writes into them before the last
            requested value are kept.

    Raises:
        ForeignNodeError: a requested node belongs to another graph.
    """
    for node in requested.values():
        if node.graph is not graph or node.is_erased:
            raise ForeignNodeError(f"requested node '{node.name}' is not in the graph that is pruned")
    liveness = Liveness(graph, set(requested.values()), root, read_elsewhere)
    copying = _Copying(liveness, set(requested.values()))
    for node in graph.nodes:
        if node in liveness.kept:
            copying.copy(node)
    small = copying.finish(requested)
    note_state(small, liveness.state_use())
    return small


class _Copying:
    """Copies kept nodes in order, with clones of requested values that a later one may overwrite.

    Args:
        liveness: says which nodes are kept.
        requested: the values that are returned.
    """

    def __init__(self, liveness: Liveness, requested: set[Node]) -> None:
        overwrites = self._overwrites = Overwrites(liveness)
        self._small = Graph(tracer_cls=liveness.graph.tracer_cls)
        self._overwritten = {
            node for node in requested if overwrites.is_overwritten(node) or overwrites.may_change_in_next_call(node)
        }
        # Values that are only checked not to have been written, by calls that were seen not to write them.
        self._checked = overwrites.unknown_calls_after(node for node in requested if node not in self._overwritten)
        # By nodes of the whole graph: what later nodes compute with, what is returned, and versions to check.
        self._copies: dict[Node, Node] = {}
        self._literals = liveness.literals
        self._returned: dict[Node, Node] = {}
        self._versions: dict[Node, Node] = {}
        # Values of which a clone is returned, until the call comes that first writes over them; and by that call.
        self._aside: set[Node] = set()
        self._written_by: dict[Node, list[Node]] = {}
        # Where gradients are off, a clone has none: the model goes on with the value itself.
        self._has_gradients = True

    def copy(self, node: Node) -> None:
        """Copy the next kept node."""
        copies, returned = self._copies, self._returned
        for each in self._written_by.get(node, ()):
            self._aside.remove(each)
            self._small.call_method("copy_", (copies[each], returned[each]))
        copied = self._small.node_copy(node, self._copy_of)
        copies[node] = returned[node] = copied
        if node in self._checked:
            self._versions[node] = self._small.call_function(version_of, (copies[node],))
        if node in self._overwritten:
            self._clone(node)
        if node.target is torch._C._set_grad_enabled:
            self._has_gradients = node.args[0] is not False

    def _copy_of(self, node: Node) -> Node | int:
        """Return what a later node computes with in the place of `node`."""
        if node in self._literals:
            return self._literals[node]
        return self._returned[node] if node in self._aside else self._copies[node]

    def _clone(self, node: Node) -> None:
        # Gradients of later values flow through the value itself only if these are computed with the clone.
        later, others = self._overwrites.clones_after(node) if self._has_gradients else ClonesAfter([], [])
        if others:
            self._clone_if_apart(node, later[0], others)
            return
        for each in later or [node]:
            copy = self._copies[each]
            clone = self._small.call_function(clone_tensors, (copy,), name=f"{copy.name}_clone")
            (self._copies if later else self._returned)[each] = clone
        if not later and self._has_gradients and (writer := self._overwrites.only_read_until(node)) is not None:
            self._aside.add(node)
            self._written_by.setdefault(writer, []).append(node)

    def _clone_if_apart(self, node: Node, value: Node, others: list[Node]) -> None:
        """Let later nodes go on with a clone of `value`, which `node` is, where it shares no memory with `others`."""
        copy, held = self._copies[value], [self._copies[each] for each in others]
        later = self._small.call_function(later_of, (copy, held), name=f"{copy.name}_clone")
        self._copies[value] = later
        self._returned[node] = self._small.call_function(returned_of, (copy, later), name=f"{copy.name}_returned")

    def finish(self, requested: Mapping[str, Node]) -> Graph:
        """Return the graph, with an output that returns the requested values by key."""
        for node, version in self._versions.items():
            what = f"'{shown_name(node)}' was written in place by {' or '.join(map(repr, self._checked[node]))}"
            self._small.call_function(check_version, (self._returned[node], version, what))
        self._small.output({key: self._returned[node] for key, node in requested.items()})
        return self._small
