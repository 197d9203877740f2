"""Follow a pattern through a graph, from its outputs to its inputs, going back where it does not fit."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator
from typing import Any

from torch import nn

from featx.ir.arguments import nodes_in
from featx.ir.equality import is_same
from featx.ir.graph import Graph
from featx.ir.node import Node
from featx.rewrite.operands import inner_pairs, is_commutative, is_constant, operand_pairs
from featx.rewrite.pattern import Link, Pattern
from featx.rewrite.targets import Test, matched_paths

_UNSEEN = object()
# What is still to compare: a value of the pattern, one of the graph, and the rest; a linked list, so that going back
# to an earlier state costs nothing.
_Pending = tuple[Any, Any, Any]


@dataclasses.dataclass
class _Choice:
    """A place to come back to: how much was matched there, and what else may be tried."""

    size: int
    anchor: int
    others: Iterator[_Pending]
    is_anchor: bool


class Search:
    """Finds the matches of one pattern in one graph, in the order of the nodes that match the first anchor.

    A match that shares an operation with an earlier one is left out if `apart`. The graph must not be edited while
    matches are drawn.
    """

    def __init__(
        self,
        pattern: Pattern,
        tests: dict[Node, Test],
        graph: Graph,
        root: nn.Module | None,
        *,
        apart: bool,
        ignore_literals: bool,
        commutative: bool,
    ) -> None:
        self._pattern, self._tests = pattern, tests
        self._graph, self._root = graph, root
        self._apart, self._ignore_literals, self._commutative = apart, ignore_literals, commutative
        self._returning = set(pattern.returning)
        # Operations of earlier matches.
        self._taken: set[Node] = set()
        self._mapping: dict[Node, Any] = {}
        self._matched: dict[Node, Node] = {}
        self._choices: list[_Choice] = []
        self._readers: dict[tuple[Node, Link | None], deque[Node]] = {}

    def run(self) -> Iterator[dict[Node, Any]]:
        """Yield, for each match, what each node of the pattern was matched to, in the order in which it was met."""
        first = self._pattern.anchors[0]
        test = self._tests[first]
        for node in self._graph.nodes:
            if test(node) and node not in self._taken:
                yield from self._from(node)

    def _from(self, node: Node) -> Iterator[dict[Node, Any]]:
        anchors, choices, mapping = self._pattern.anchors, self._choices, self._mapping
        pending: _Pending | None = (anchors[0], node, None)
        anchor = 0
        while pending is not None:
            if self._follow(pending, anchor):
                anchor += 1
                if anchor < len(anchors):
                    choices.append(_Choice(len(mapping), anchor, self._starts(anchor), is_anchor=True))
                elif self._is_valid():
                    found = dict(mapping)
                    if self._apart:
                        self._taken.update(node for node, wanted in self._matched.items() if _is_operation(wanted))
                        choices.clear()
                    while choices and not choices[-1].is_anchor:
                        choices.pop()  # the same operations with their operands exchanged
                    yield found
            pending = None
            while choices and pending is None:
                anchor = choices[-1].anchor
                self._undo(choices[-1].size)
                pending = next(choices[-1].others, None)
                if pending is None:
                    choices.pop()
        self._undo(0)

    def _undo(self, size: int) -> None:
        mapping, matched = self._mapping, self._matched
        while len(mapping) > size:
            _, value = mapping.popitem()
            if isinstance(value, Node):
                del matched[value]

    # -- comparing ---------------------------------------------------------------------------------------------------

    def _follow(self, pending: _Pending | None, anchor: int) -> bool:
        """Match what is pending and all that it leads to; False at the first difference."""
        mapping, matched, tests = self._mapping, self._matched, self._tests
        while pending is not None:
            wanted, found, pending = pending
            if not isinstance(wanted, Node):
                pairs = inner_pairs(wanted, found)
                if pairs is None:
                    if not self._fits(wanted, found):
                        return False
                    continue
            else:
                known = mapping.get(wanted, _UNSEEN)
                if known is not _UNSEEN:
                    if not is_same(known, found):
                        return False
                    continue
                if not isinstance(found, Node):
                    # An input stands for constants too.
                    if wanted.op != "placeholder":
                        return False
                    mapping[wanted] = found
                    continue
                test = tests.get(wanted)
                if found in matched or (test is not None and not test(found)):
                    return False
                mapping[wanted] = found
                matched[found] = wanted
                if wanted.op == "placeholder":
                    continue
                if found in self._taken:
                    return False
                pairs = operand_pairs(wanted, found, self._root)
                if pairs is None:
                    return False
                if self._commutative and len(pairs) == 2 and is_commutative(found):
                    self._remember_exchanged(pairs, pending, anchor)
            for item, other in reversed(pairs):
                pending = (item, other, pending)
        return True

    def _fits(self, wanted: Any, found: Any) -> bool:
        return is_constant(wanted, found) or (self._ignore_literals and not nodes_in(wanted))

    def _remember_exchanged(self, pairs: list[tuple[Any, Any]], pending: _Pending | None, anchor: int) -> None:
        (one, first), (other, second) = pairs
        exchanged = (one, second, (other, first, pending))
        self._choices.append(_Choice(len(self._mapping), anchor, iter([exchanged]), is_anchor=False))

    # -- further outputs ---------------------------------------------------------------------------------------------

    def _starts(self, anchor: int) -> Iterator[_Pending]:
        """Yield the nodes that may be a further anchor, in graph order: readers of what is matched already."""
        wanted = self._pattern.anchors[anchor]
        links = [link for link in self._pattern.links[anchor] if isinstance(self._mapping[link.start], Node)]
        if links:
            link = min(links, key=lambda link: len(self._mapping[link.start].users))
            starts = self._readers_along(link, self._mapping[link.start])
        else:
            starts = self._everywhere(anchor)
        while starts and starts[0] in self._taken:
            starts.popleft()
        for node in starts:
            yield wanted, node, None

    def _readers_along(self, link: Link, start: Node) -> deque[Node]:
        # Remembered, without those that matches have taken: many matches may start from one value that all read.
        known = self._readers.get((start, link))
        if known is None:
            level = [start]
            for step in link.path:
                test = self._tests[step]
                level = list(dict.fromkeys([user for node in level for user in node.users if test(user)]))
            known = self._readers[start, link] = deque(sorted(level))
        return known

    def _everywhere(self, anchor: int) -> deque[Node]:
        wanted = self._pattern.anchors[anchor]
        known = self._readers.get((wanted, None))
        if known is None:
            test = self._tests[wanted]
            known = self._readers[wanted, None] = deque(node for node in self._graph.nodes if test(node))
        return known

    # -- whole matches -----------------------------------------------------------------------------------------------

    def _is_valid(self) -> bool:
        return (
            self._is_contained() and not self._has_cycle() and matched_paths(self._pattern, self._mapping) is not None
        )

    def _is_contained(self) -> bool:
        """Say whether only the match itself reads its inner values."""
        matched = self._matched
        for node, wanted in matched.items():
            if wanted.op == "placeholder" or wanted in self._returning:
                continue
            for user in node.users:
                reader = matched.get(user)
                if reader is None or reader.op == "placeholder":
                    return False
        return True

    def _has_cycle(self) -> bool:
        """Say whether an operation of the match depends, by way of others, on what the match returns."""
        if len(self._returning) == 1:
            return False  # all of the match comes before what it returns
        inside = {node for node, wanted in self._matched.items() if _is_operation(wanted)}
        last = max(inside)
        waiting = [user for node in inside for user in node.users if user not in inside and user < last]
        if not waiting:
            return False
        seen = set(waiting)
        while waiting:
            for user in waiting.pop().users:
                if user in inside:
                    return True
                if user not in seen and user < last:
                    seen.add(user)
                    waiting.append(user)
        return False


def _is_operation(wanted: Node) -> bool:
    return wanted.op not in ("placeholder", "output")
