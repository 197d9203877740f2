"""A place in a graph where a match is to be replaced."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

from featx.ir.node import Node
from featx.rewrite.match import InternalMatch
from featx.rewrite.pattern import Pattern
from featx.rewrite.replacement import Replacement


class Site:
    """A match and its replacement.

    `nodes` are the operations of the match in graph order, and `paths` maps the targets in the replacement to targets
    in the graph.
    """

    # Kept for each match, so as small as can be: garbage collections cost more than all else in a large graph.
    __slots__ = ("_pattern", "match", "nodes", "paths", "replacement")

    def __init__(self, pattern: Pattern, match: InternalMatch, replacement: Replacement, paths: dict[str, str]) -> None:
        self._pattern = pattern
        self.match, self.replacement, self.paths = match, replacement, paths
        self.nodes: list[Node] = sorted(
            [node for wanted, node in match.nodes_map.items() if wanted.op not in ("placeholder", "output")],
            key=attrgetter("label"),
        )

    @property
    def outputs(self) -> list[tuple[Node, Any]]:
        """The nodes of the match that others may read, each with what of the replacement takes its place."""
        nodes_map = self.match.nodes_map
        return [(nodes_map[wanted], value) for wanted, value in self.replacement.outputs]

    @property
    def inputs(self) -> dict[Node, Any]:
        """What the inputs of the replacement stand for in the graph."""
        return dict(zip(self.replacement.placeholders, self.match.placeholder_nodes, strict=True))

    def origin_of(self, node: Node) -> Node:
        """Return the node of the match that a node of the replacement helps to replace."""
        return self.match.nodes_map[self.replacement.sources[node]]

    def update_inputs(self, current: Callable[[Any], Any]) -> None:
        """Let the match say what the inputs of the pattern stand for now; `current` maps values to that."""
        match = self.match
        match.placeholder_nodes[:] = [current(value) for value in match.placeholder_nodes]
        match.nodes_map.update(zip(self._pattern.placeholders, match.placeholder_nodes, strict=True))
