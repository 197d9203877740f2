"""Cut a graph down to what chosen values depend on, and return those values as they were when they were computed."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from featx.errors import ForeignNodeError
from featx.features.building.left_attributes import note_state
from featx.features.building.liveness import Liveness, name_of
from featx.ir.graph import Graph
from featx.ir.node import Node
from featx.tracing.guards.versions import check_version, version_of
from featx.tree import clone_tensors


def prune(
    graph: Graph, wanted: Mapping[str, Node], root: nn.Module, read_elsewhere: frozenset[int] = frozenset()
) -> Graph:
    """Copy the part of `graph` that `wanted` depends on, with an output that returns them as a dict by key.

    Nodes after the last requested one are removed. Calls that write into a value that is read later are kept even if
    nothing reads their result; so do writes into the state of the model that the kept part reads, random draws ahead
    of a kept one (they move the generator), and checks of the form of kept values. A wanted value that a kept call
    overwrites later is cloned where it is right: the value itself is returned, and what comes behind computes with the
    clone, so that gradients of later values with respect to it exist. Where other values share its memory and are read
    later, the clone is returned; the value has a gradient then if nothing but itself is read of its memory until the
    call that overwrites it: calls ahead read the clone, and that one finds it copied back. All inputs stay. `graph` is
    not changed. O(nodes + edges).

    Args:
        graph: a traced graph of `root`.
        wanted: what to return, by key.
        root: the model, in the mode in which it was traced.
        read_elsewhere: ids of tensors of the model that another graph of it reads: writes into them ahead of the last
            wanted value are kept.

    Raises:
        ForeignNodeError: a wanted node belongs to another graph.
    """
    for node in wanted.values():
        if node.graph is not graph or node.is_erased:
            raise ForeignNodeError(f"wanted node '{node.name}' is not in the graph that is pruned")
    liveness = Liveness(graph, set(wanted.values()), root, read_elsewhere)
    overwritten = {
        node for node in wanted.values() if liveness.is_overwritten(node) or liveness.may_change_in_next_call(node)
    }
    small = Graph(tracer_cls=graph.tracer_cls)
    copies: dict[Node, Node] = {}
    returned: dict[Node, Node] = {}
    checked = liveness.unknown_calls_behind(node for node in wanted.values() if node not in overwritten)
    versions: dict[Node, Node] = {}
    # Values of which a clone is returned, with the call that first writes over them, if it is still to come.
    aside: dict[Node, Node] = {}
    # Where gradients are off, a clone has none: the model goes on with the value itself.
    has_gradients = True
    for node in graph.nodes:
        if node in liveness.kept:
            for each in [each for each, writer in aside.items() if writer is node]:
                del aside[each]
                small.call_method("copy_", (copies[each], returned[each]))
            known = copies | {each: returned[each] for each in aside} if aside else copies
            copies[node] = returned[node] = small.node_copy(node, known.__getitem__)
            if node in checked:
                versions[node] = small.call_function(version_of, (copies[node],))
            if node in overwritten:
                # Gradients of what comes behind flow through the value itself only if that goes on with the clone.
                behind = liveness.nodes_to_clone_behind(node) if has_gradients else []
                for each in behind or [node]:
                    clone = small.call_function(clone_tensors, (copies[each],), name=f"{copies[each].name}_clone")
                    (copies if behind else returned)[each] = clone
                if not behind and has_gradients and (writer := liveness.only_read_until(node)) is not None:
                    aside[node] = writer
            if node.target is torch._C._set_grad_enabled:
                has_gradients = node.args[0] is not False
    for node, version in versions.items():
        what = f"'{name_of(node)}' was written in place by {' or '.join(map(repr, checked[node]))}"
        small.call_function(check_version, (returned[node], version, what))
    small.output({key: returned[node] for key, node in wanted.items()})
    note_state(small, liveness.state_use())
    return small
