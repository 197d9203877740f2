"""Find the point of a graph where a replacement goes: after all that it reads, before all that reads it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from featx.ir.node import Node
from featx.rewrite.site import Site


def point_behind(site: Site) -> Node:
    """Return the node after the last one of the match."""
    return site.nodes[-1].next


def point_anywhere(
    site: Site,
    inputs: Sequence[Node],
    gone: Collection[Node],
    may_move: Callable[[Node], bool],
    inputs_of: Callable[[Node], Iterable[Node]],
) -> Node | None:
    """Return the node before which the replacement goes, or None if there is no such point.

    That is the first reader of what the match returns, as in torch.fx, if all `inputs` stand before it. If they do
    not, those that stand after it are moved up, with what they depend on, where `may_move` allows that. Readers among
    `gone` do not count. `inputs_of` tells what a node will read when the rewriting is done. O(readers + moved nodes).
    """
    inside = set(site.nodes)
    readers = [user for node, _ in site.outputs for user in node.users if user not in gone]
    behind = max(node for node, _ in site.outputs).next
    latest = max(inputs, default=None)
    first = min(readers, default=behind)
    if latest is None or latest < first:
        return first
    first = min([user for user in readers if user not in inside], default=point_behind(site))
    if latest < first:
        return first
    moving = _late(inputs, first, inside, may_move, inputs_of)
    if moving is None:
        return None
    for node in moving:
        first.prepend(node)
    return first


def _late(
    inputs: Sequence[Node],
    first: Node,
    inside: Collection[Node],
    may_move: Callable[[Node], bool],
    inputs_of: Callable[[Node], Iterable[Node]],
) -> list[Node] | None:
    """Return, in graph order, what of `inputs` and their inputs stands after `first`; None if some must stay there."""
    late: set[Node] = set()
    waiting = [node for node in inputs if node >= first]
    while waiting:
        node = waiting.pop()
        if node in late:
            continue
        if node in inside or node is first or not may_move(node):
            return None
        late.add(node)
        waiting.extend(source for source in inputs_of(node) if source >= first)
    return sorted(late)
