"""Keep the labels by which nodes compare in order, whatever is inserted where."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from featx.ir.node import Node

# Distance between neighbours when nodes are appended; room for about 20 insertions before labels are spread anew.
LABEL_STEP = 1 << 20


def spread_labels(node: Node, root: Node) -> None:
    """Make room around `node`, whose neighbours' labels leave none.

    The smallest range of labels around it that is sparse enough is labelled anew, evenly; the wider the range, the
    sparser it must be. An insertion then costs O(log n) amortised wherever it is, and labels stay small integers
    (Bender et al., "Two Simplified Algorithms for Maintaining Order in a List", ESA 2002).
    """
    first = last = node
    count = 1
    width = 1
    capacity = 1.0
    base = node.prev.label
    while True:
        width *= 2
        capacity *= 1.4
        low = base & -width
        high = low + width
        while first.prev is not root and first.prev.label >= low:
            first = first.prev
            count += 1
        while last.next is not root and last.next.label < high:
            last = last.next
            count += 1
        if count <= capacity and width >= 2 * count:
            break
    for index in range(count):
        first.label = low + index * width // count
        first = first.next
