"""When the memory of a graph is written and read: what may change places, and what may not."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from torch import nn

from featx.ir.effects import Effects
from featx.ir.graph import Graph
from featx.ir.memory import MemoryGroups
from featx.ir.node import Node
from featx.rewrite.replacement import has_effect


class Timeline:
    """The effects of the nodes of a graph, by position.

    It says how things were when it was made: ask it about nodes that were there then. `changes` are values whose memory
    is going to be written by what takes the place of matches, `others` values whose readers will be asked for. Made in
    O(nodes + edges), asked in O(log nodes) for each node of a question.
    """

    def __init__(
        self,
        graph: Graph,
        root: nn.Module,
        effects: Effects,
        changes: Iterable[Node] = (),
        others: Iterable[Node] = (),
    ) -> None:
        self._effects = effects
        self._memory = memory = MemoryGroups(graph, effects)
        memory.join_shared_state(root)
        changes = list(changes)
        memory.join_written_inputs(changes)
        self._positions = {node: position for position, node in enumerate(graph.nodes)}
        self._writes: defaultdict[int, list[int]] = defaultdict(list)
        self._draws: list[int] = []
        self._checks: list[int] = []
        self._switches: list[int] = []
        for node, position in self._positions.items():
            if has_effect(effects.of(node)):
                self._note(node, position)
        self._further_writes = {memory.of(value) for value in changes}
        # Only what is written makes a difference to those who read it.
        self._watched = self._further_writes.union(self._writes, map(memory.of, others))
        self._touches: dict[int, list[int]] = {group: [] for group in self._watched}
        # For each memory, where its values are made and where they and those before them are read last.
        self._made: dict[int, list[int]] = {group: [] for group in self._watched}
        self._read: dict[int, list[int]] = {group: [] for group in self._watched}
        # How many calls reach it by a path of the model.
        self._reached: Counter[int] = Counter()
        if self._watched:
            self._watch()

    def _note(self, node: Node, position: int) -> None:
        found = self._effects.of(node)
        for group in self._memory.written_by(node):
            self._writes[group].append(position)
        if found.is_random:
            self._draws.append(position)
        if found.is_check:
            self._checks.append(position)
        if found.changes_global_state:
            self._switches.append(position)

    def _watch(self) -> None:
        positions, memory = self._positions, self._memory
        for node, position in positions.items():
            for group in self._touched_by(node) & self._watched:
                self._touches[group].append(position)
            self._reached.update(self._reached_by(node))
            group = memory.of(node)
            if group in self._watched:
                last = max(map(positions.__getitem__, node.users), default=position)
                reads = self._read[group]
                reads.append(max(last, reads[-1]) if reads else last)
                self._made[group].append(position)

    def _touched_by(self, node: Node) -> set[int]:
        """Return the memory that `node` reads, writes or makes."""
        return self._memory.read_by(node) | {self._memory.of(node)}

    def _reached_by(self, node: Node) -> list[int]:
        """Return the memory of the model that `node` reaches by a path, once for each path."""
        groups = [self._memory.of(source) for source in node.all_input_nodes if source.op == "get_attr"]
        return [*groups, self._memory.state_of(node)] if node.op == "call_module" else groups

    # -- questions ---------------------------------------------------------------------------------------------------

    def is_free(self, nodes: Iterable[Node]) -> bool:
        """Say whether `nodes` may stand anywhere that their inputs and readers allow.

        They do nothing but compute their values, from and into memory that is never written.
        """
        if self._switches:
            return False
        for node in nodes:
            if node not in self._positions or has_effect(self._effects.of(node)):
                return False
            if any(group in self._writes or group in self._further_writes for group in self._touched_by(node)):
                return False
        return True

    def are_apart(self, nodes: Sequence[Node]) -> bool:
        """Say whether `nodes`, in graph order, may all move down to the last of them, past what stands between."""
        low, high = self._positions[nodes[0]], self._positions[nodes[-1]]
        if high - low == len(nodes) - 1:
            return True
        touches: Counter[int] = Counter()
        writes: Counter[int] = Counter()
        draws = checks = 0
        for node in nodes:
            touches.update(self._touched_by(node))
            writes.update(self._memory.written_by(node))
            found = self._effects.of(node)
            draws += found.is_random
            checks += found.is_check
        if _count(self._switches, low, high):
            return False
        if any(_count(self._writes.get(group, ()), low, high) > writes[group] for group in touches):
            return False
        written = writes.keys() | (touches.keys() & self._further_writes)
        if any(_count(self._touches[group], low, high) > touches[group] for group in written):
            return False
        if draws and _count(self._draws, low, high) > draws:
            return False
        return not ((draws or writes or checks) and _count(self._checks, low, high) > checks)

    def is_written_after(self, value: Node, nodes: Sequence[Node]) -> bool:
        """Say whether anything but `nodes` writes the memory of `value` after the first of them."""
        group = self._memory.of(value)
        own = sum(group in self._memory.written_by(node) for node in nodes)
        places = self._writes.get(group, ())
        return len(places) - bisect_left(places, self._positions[nodes[0]]) > own or group in self._further_writes

    def is_read_after(self, value: Node, nodes: Sequence[Node]) -> bool:
        """Say whether something after `nodes` reads the memory of `value` by a name from before them.

        Memory of the model has its paths for names: whoever else follows one of them reads it, at the latest in the
        next call.
        """
        group = self._memory.of(value)
        own = sum(self._reached_by(node).count(group) for node in nodes)
        if self._reached[group] > own:
            return True
        count = bisect_left(self._made[group], self._positions[nodes[0]])
        return count > 0 and self._read[group][count - 1] > self._positions[nodes[-1]]

    def is_one_memory(self, value: Node, other: Node) -> bool:
        """Say whether two values may share memory."""
        return self._memory.of(value) == self._memory.of(other)

    def is_external(self, value: Node) -> bool:
        """Say whether the caller or the model may hold the memory of `value`."""
        return self._memory.is_external(value)


def _count(places: Sequence[int], low: int, high: int) -> int:
    return bisect_right(places, high) - bisect_left(places, low)
