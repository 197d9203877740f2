"""Say which matches may be replaced without changing what the rest of the graph computes, and where to."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

from torch import nn

from featx.ir.arguments import nodes_in
from featx.ir.effects import Effects
from featx.ir.graph import Graph
from featx.ir.node import Node
from featx.rewrite.replacement import has_effect, memory_of
from featx.rewrite.site import Site
from featx.rewrite.timeline import Timeline

# What memory comes from: a node, or the path of an attribute that no node of the match reads.
_Root: TypeAlias = Node | str


class Place(enum.Enum):
    """Where a replacement may go."""

    BEHIND = "right after the last node of the match"
    ANYWHERE = "wherever its inputs and its readers allow"


class Safety:
    """What may be replaced in a graph.

    A match must not where something between its nodes writes what it reads or reads what it writes, where its
    replacement would part, or bring together, memory that is written later, where it would change what is read later,
    and where two of its inputs may be one memory that it writes. `places` has no entry for such a match; for the others
    it says where the replacement may go.

    The graph is not changed. O(nodes + edges), or O(nodes of the matches) where each match is a run of nodes that only
    the next node reads and whose replacement shares and writes the memory that it does.
    """

    def __init__(self, graph: Graph, root: nn.Module, sites: Sequence[Site]) -> None:
        self.places: dict[Site, Place] = {}
        self._timeline: Timeline | None = None
        effects = Effects(graph, root)
        changes = {site: _Change(site, effects) for site in sites if _may_change(site, effects)}
        if not any(changes.values()) and all(map(_is_run, sites)):
            self.places = dict.fromkeys(sites, Place.BEHIND)
            return
        if not any(change.has_writes for change in changes.values()) and _is_quiet(graph, effects):
            self.places = dict.fromkeys(sites, Place.ANYWHERE)
            return
        self._timeline = timeline = Timeline(
            graph,
            root,
            effects,
            changes=[value for change in changes.values() for value in change.written if isinstance(value, Node)],
            others=[value for change in changes.values() for value in change.roots if isinstance(value, Node)],
        )
        for site in sites:
            change = changes.get(site)
            place = _place(site, timeline) if change is None or not change.does_harm(timeline) else None
            if place is not None:
                self.places[site] = place

    def may_move(self, node: Node) -> bool:
        """Say whether a node that was in the graph may stand anywhere that its inputs and readers allow."""
        if node.op == "placeholder":
            return False  # their order is the signature
        return self._timeline is None or self._timeline.is_free([node])


def _may_change(site: Site, effects: Effects) -> bool:
    """Say, quickly, whether a match and its replacement may differ in the memory that they share and write."""
    return not site.replacement.is_separate or any(
        found.shares or found.writes for found in map(effects.of, site.nodes)
    )


def _is_quiet(graph: Graph, effects: Effects) -> bool:
    """Say whether no node of a graph does anything but compute its value."""
    return not any(has_effect(effects.of(node)) for node in graph.nodes)


def _is_run(site: Site) -> bool:
    """Say whether the nodes of a match stand one after the other, and before the first node that reads them."""
    nodes = site.nodes
    behind = nodes[0]
    for node in nodes:
        if node is not behind:
            return False
        behind = behind.next
    return any(behind in node.users for node, _ in site.outputs)


def _place(site: Site, timeline: Timeline) -> Place | None:
    if timeline.is_free(site.nodes):
        return Place.ANYWHERE
    last = site.nodes[-1]
    inside = set(site.nodes)
    if any(user < last and user not in inside for node, _ in site.outputs for user in node.users):
        return None
    return Place.BEHIND if timeline.are_apart(site.nodes) else None


class _Change:
    """How a replacement differs from a match in the memory that it shares and writes."""

    def __init__(self, site: Site, effects: Effects) -> None:
        self._site = site
        # The first node that reads an attribute stands for all that do.
        self._readers: dict[str, Node] = {}
        before, writes = memory_of(site.nodes, effects)
        outputs = site.outputs
        old_roots: dict[Node, frozenset[_Root]] = {
            node: frozenset(map(self._root_of, before[node])) for node, _ in outputs
        }
        old_writes = frozenset(map(self._root_of, writes))
        new_roots = {node: self._new_roots(value) for node, value in outputs}
        new_writes = frozenset(root for value in site.replacement.writes for root in self._outer_roots(value))
        inside = {node for node in site.nodes if node.op != "get_attr"}
        # Outputs with the memory from outside that they share now and did not, or did and do not.
        self.parted = [
            (node, root)
            for node, roots in old_roots.items()
            for root in roots ^ new_roots[node]
            if isinstance(root, str) or (root not in inside and root.graph is node.graph)
        ]
        # Outputs that share memory now and did not, or did and do not.
        self.pairs = _meetings(old_roots) ^ _meetings(new_roots)
        self.written = new_writes - old_writes
        self.unwritten = old_writes - new_writes
        self.overlaps = self._overlaps(old_writes | new_writes)

    def __bool__(self) -> bool:
        return bool(self.parted or self.pairs or self.has_writes or self.overlaps)

    @property
    def has_writes(self) -> bool:
        """Whether the replacement writes what the match does not, or the other way round."""
        return bool(self.written or self.unwritten)

    @property
    def roots(self) -> Iterator[_Root]:
        """The memory whose readers make a difference."""
        yield from (root for _, root in self.parted)
        yield from self.written
        yield from self.unwritten

    def _overlaps(self, writes: Iterable[_Root]) -> list[tuple[_Root, Node]]:
        """Pair what is written with the other inputs of the match, which must not be the same memory.

        A pattern and a replacement that do the same for inputs apart may differ where one input is a view of another.
        """
        inside = set(self._site.nodes)
        return [
            (root, other)
            for root in writes
            for node in self._site.nodes
            for other in map(self._root_of, node.all_input_nodes)
            if other is not root and (other.op == "get_attr" or other not in inside)
        ]

    def _root_of(self, node: Node) -> Node:
        return self._readers.setdefault(node.target, node) if node.op == "get_attr" else node

    def _new_roots(self, value: Any) -> frozenset[_Root]:
        if not isinstance(value, Node):
            return frozenset()
        sources = self._site.replacement.roots.get(value) or {value}
        return frozenset([root for source in sources for root in self._outer_roots(source)])

    def _outer_roots(self, node: Node) -> Iterator[_Root]:
        """Yield what a node of the replacement that memory comes from is in the graph."""
        if node.op == "placeholder":
            yield from map(self._root_of, nodes_in(self._site.inputs[node]))
        elif node.op == "get_attr":
            path = self._site.paths[node.target]
            yield self._readers.get(path, path)
        else:
            yield node

    def does_harm(self, timeline: Timeline) -> bool:
        """Say whether the rest of the graph would see the difference."""
        nodes = self._site.nodes

        def is_alive(root: _Root) -> bool:
            return isinstance(root, str) or timeline.is_external(root) or timeline.is_read_after(root, nodes)

        def is_written(value: _Root) -> bool:
            return isinstance(value, Node) and timeline.is_written_after(value, nodes)

        return (
            any(is_alive(root) and (is_written(node) or is_written(root)) for node, root in self.parted)
            or any(is_written(node) or is_written(other) for node, other in self.pairs)
            or any(map(is_alive, self.written))
            or any(timeline.is_read_after(root, nodes) for root in self.unwritten)
            or any(isinstance(root, str) or timeline.is_one_memory(root, other) for root, other in self.overlaps)
        )


def _meetings(roots: dict[Node, frozenset[_Root]]) -> set[tuple[Node, Node]]:
    """Return the pairs of outputs that may share memory, each in the order of the outputs."""
    holders: dict[_Root, list[Node]] = {}
    for node, sources in roots.items():
        for root in sources:
            holders.setdefault(root, []).append(node)
    return {pair for nodes in holders.values() if len(nodes) > 1 for pair in itertools.combinations(nodes, 2)}
