"""Let a graph check that its module is in the mode that a pass relied on."""

from __future__ import annotations

from featx.module import GraphModule
from featx.tracing.guards import check_decision


def require_present_mode(gm: GraphModule, reason: str) -> None:
    """Add a check that `gm` is in the mode in which it is now, train or eval, unless its graph has one. O(nodes).

    `reason` says what holds in this mode only.
    """
    graph = gm.graph
    for read in graph.find_nodes(op="get_attr", target="training"):
        if any(user.target is check_decision and user.args[1] is gm.training for user in read.users):
            return
    first = next(node for node in graph.nodes if node.op != "placeholder")
    what = f"the train mode ({reason}: make the graph anew for the other mode, or erase this check from it)"
    with graph.inserting_before(first):
        mode = graph.get_attr("training")
        check = graph.call_function(check_decision, (mode, gm.training, what))
    check.meta["is_guard"] = True
