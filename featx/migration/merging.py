"""Join nodes into partitions one by one, from the end of a graph, as far as no two partitions need each other."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from featx.ir.node import Node
from featx.module import GraphModule
from featx.passes.accesses import Accesses


@dataclasses.dataclass
class _Part:
    """Nodes that are joined. Sets of nodes are integers here, with one bit for each node of the graph."""

    order: int
    nodes: list[Node]
    members: int
    readers: int  # what must run directly after one of them
    behind: int  # what must run after one of them

    def joined(self, other: _Part) -> _Part:
        return _Part(
            min(self.order, other.order),
            [*self.nodes, *other.nodes],
            self.members | other.members,
            self.readers | other.readers,
            self.behind | other.behind,
        )


class PartitionMerger:
    """Makes the partitions of torch.fx's partitioner, which looks at the nodes from the last one to the first.

    Args:
        gm: the module whose nodes are joined.
        accesses: what its nodes read and write.
    """

    def __init__(self, gm: GraphModule, accesses: Accesses) -> None:
        inner = [
            node
            for node in gm.graph.nodes
            if node.op not in ("placeholder", "output") and not accesses.is_fixed_read(node)
        ]
        self._place = {node: place for place, node in enumerate(inner)}
        self._readers = [0] * len(inner)
        self._behind = [0] * len(inner)
        for first, second in accesses.dependencies(inner, in_modes=True):
            self._readers[self._place[first]] |= 1 << self._place[second]
        for place in reversed(range(len(inner))):
            readers = self._readers[place]
            self._behind[place] = readers
            for reader in _places(readers):
                self._behind[place] |= self._behind[reader]
        self._parts: dict[int, _Part] = {}
        self._made = 0
        self._may_join = False

    def add(self, node: Node) -> int:
        """Make a partition of `node` alone, and return its number."""
        place, number = self._place[node], self._made
        self._parts[number] = _Part(number, [node], 1 << place, self._readers[place], self._behind[place])
        self._made += 1
        self._may_join = True
        return number

    def join_with_users(self, number: int) -> None:
        """Join a partition of one node with those of the node's users, one after the other."""
        (node,) = self._parts[number].nodes
        self._join([number, *dict.fromkeys(part for user in node.users for part in self._of(user))])

    def join_all(self, first: int | None = None) -> None:
        """Join a partition, by default that of the last node, with all others, one after the other."""
        if first is not None:
            self._join(dict.fromkeys([first, *self._in_order()]))
        elif self._may_join:
            self._may_join = self._join(self._in_order())

    def _in_order(self) -> list[int]:
        return sorted(self._parts, key=lambda number: self._parts[number].order)

    def partitions(self) -> dict[int, list[Node]]:
        """Return the nodes by the number of their partition, in the order in which the partitions were made."""
        return {number: list(part.nodes) for number, part in self._parts.items()}

    def _of(self, node: Node) -> Iterator[int]:
        place = self._place.get(node)
        for number, part in self._parts.items():
            if place is not None and part.members >> place & 1:
                yield number

    def _join(self, numbers: Iterable[int]) -> bool:
        first, *others = numbers
        has_joined = False
        for other in others:
            if not self._need_each_other(first, other):
                # The larger one keeps its number, and its place among the partitions.
                kept, gone = first, other
                if len(self._parts[first].nodes) < len(self._parts[other].nodes):
                    kept, gone = other, first
                self._parts[kept] = self._parts[kept].joined(self._parts.pop(gone))
                first, has_joined = kept, True
        return has_joined

    def _need_each_other(self, first: int, second: int) -> bool:
        """Say whether the two, joined, would need something that needs them."""
        members = self._parts[first].members | self._parts[second].members
        reached = 0
        for reader in _places((self._parts[first].readers | self._parts[second].readers) & ~members):
            reached |= 1 << reader | self._behind[reader]
        others = [part for number, part in self._parts.items() if number not in (first, second)]
        while not reached & members:
            met = [part for part in others if part.members & reached]
            if not met:
                return False
            others = [part for part in others if not part.members & reached]
            for part in met:
                reached |= part.behind
        return True


def _places(nodes: int) -> Iterator[int]:
    while nodes:
        lowest = nodes & -nodes
        yield lowest.bit_length() - 1
        nodes ^= lowest
