"""Group the nodes of a graph by the memory that their values may share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from featx.ir.effects import Effects
    from featx.ir.graph import Graph
    from featx.ir.node import Node


class MemoryGroups:
    """A partition of the nodes: two values that may share memory are in one group.

    Views, in-place results and whatever is not known to be fresh join the groups of their inputs, and reads of one
    attribute are one group. What a called module keeps (its parameters and buffers) is a group too, which reads of them
    belong to. Built in O(nodes + edges), practically; asked in O(1).
    """

    def __init__(self, graph: Graph, effects: Effects) -> None:
        self._parents: list[int] = []
        self._groups: dict[Node, int] = {}
        self._external: set[int] = set()
        attributes: dict[object, int] = {}
        modules = {node.target for node in graph.nodes if node.op == "call_module"}
        self._states = {path: index for index, path in enumerate(modules)}
        self._parents.extend(self._states.values())
        for node in graph.nodes:
            group = len(self._parents)
            self._parents.append(group)
            self._groups[node] = group
            if node.op == "get_attr":
                self._join(group, attributes.setdefault(effects.storage_of(node), group))
                for path in _prefixes(node.target):
                    if path in self._states:
                        self._join(group, self._states[path])
            for source in effects.of(node).shares:
                self._join(group, self._groups[source])
        for node in graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                self._external.add(self.of(node))

    def of(self, node: Node) -> int:
        """Return the number of the group of `node`."""
        return self._find(self._groups[node])

    def state_of(self, node: Node) -> int:
        """Return the group of what the module that `node` calls keeps."""
        return self._find(self._states[node.target])

    def is_external(self, node: Node) -> bool:
        """Say whether the value of `node` may share memory with an input or with the model's own tensors."""
        return self.of(node) in self._external

    def _find(self, group: int) -> int:
        parents = self._parents
        while parents[group] != group:
            parents[group] = parents[parents[group]]
            group = parents[group]
        return group

    def _join(self, one: int, other: int) -> None:
        one, other = self._find(one), self._find(other)
        if one != other:
            self._parents[max(one, other)] = min(one, other)


def _prefixes(path: str) -> Iterator[str]:
    while "." in path:
        path = path.rpartition(".")[0]
        yield path
