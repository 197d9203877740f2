"""Which requested values a kept call may overwrite later, and what goes on with a clone of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import cached_property
from typing import NamedTuple

from featx.features.building.liveness import Liveness
from featx.ir.memory import MemoryGroups
from featx.ir.names import shown_name
from featx.ir.node import Node
from featx.tracing.nodes.module_output import module_output

# Nodes whose memory exists outside of a call.
_OUTSIDE = ("placeholder", "get_attr")


class ClonesAfter(NamedTuple):
    """The nodes of which later ones may get clones, and the values with which these must not share memory then."""

    nodes: list[Node]
    others: list[Node]


class _KeptInGroups(NamedTuple):
    """By group of memory: the kept nodes with a value there, and those that may write it, in order."""

    values: dict[int, list[Node]]
    writers: dict[int, list[Node]]


class Overwrites:
    """What the kept nodes of a graph write of the memory of values that are returned.

    Args:
        liveness: knows the graph, and which of its nodes are kept.
    """

    def __init__(self, liveness: Liveness) -> None:
        self._graph = liveness.graph
        self._effects = liveness.effects
        self._memory = liveness.memory
        self._kept = liveness.kept
        self._possibly_returned = liveness.possibly_returned
        self._known: dict[MemoryGroups, _KeptInGroups] = {}

    def is_overwritten(self, node: Node) -> bool:
        """Say whether a kept call after `node` may write into its memory."""
        writers = self._writers_after(node, self._memory)
        if node.meta.get("is_overwritten") and self._memory.of(node) not in self._written_groups:
            return True  # by a call that reaches the tensor in another way than by its arguments
        is_assumed = any(self._effects.of(writer).is_opaque for writer in writers)
        if node.meta.get("is_overwritten", True) or is_assumed or not writers:
            return bool(writers)
        # It was not written for the example; but what was copied there may be the same memory for another input.
        return not writers <= self._writers_after(node, self._memory_as_copied)

    def unknown_calls_after(self, requested: Iterable[Node]) -> dict[Node, list[str]]:
        """Return which kept calls get the memory of requested values and were only seen not to write it, by value."""
        calls: dict[int, list[Node]] = {}
        for call in self._graph.nodes:
            if call in self._kept and "effects" in call.meta:
                for group in {self._memory.of(source) for source in call.all_input_nodes}:
                    calls.setdefault(group, []).append(call)
        found = {
            node: [shown_name(call) for call in calls.get(self._memory.of(node), ()) if call > node]
            for node in requested
        }
        return {node: names for node, names in found.items() if names}

    def may_change_in_next_call(self, node: Node) -> bool:
        """Say whether a value may be a tensor of the model's state, which a kept call writes in each call."""
        group = self._memory.of(node)
        return group in self._groups_of_state and group in self._in_groups(self._memory).writers

    @cached_property
    def _groups_of_state(self) -> set[int]:
        nodes = self._graph.nodes
        return {
            self._memory.of(node) for node in nodes if node.op == "get_attr" or self._effects.of(node).returns_state
        }

    @cached_property
    def _written_groups(self) -> set[int]:
        return self._memory.written()

    def clones_after(self, node: Node) -> ClonesAfter:
        """Say what may go on with clones, so that `node` can be returned as it is: what is read or written later of it.

        That is `node`, and where it marks what a module has returned, what it takes. Nothing may where an input or the
        model's own tensors are that memory, or another value from before `node` that is used later. Where that may be
        so for other inputs alone, for which a module returns what it is given, it is decided for each call.
        """
        nodes = node.all_input_nodes if node.target is module_output else [node]
        memory = self._memory_without_marks
        if len({memory.of(each) for each in nodes}) < len(nodes) or self._shared_with_others(node, nodes, memory):
            return ClonesAfter([], [])
        others = self._shared_with_others(node, nodes, self._memory_of_other_inputs)
        return ClonesAfter(nodes, others) if len(nodes) == 1 or not others else ClonesAfter([], [])

    def _shared_with_others(self, node: Node, nodes: Collection[Node], memory: MemoryGroups) -> list[Node]:
        """Return the values from before `node` that may share the memory of `nodes` and may be used after it.

        An input or a tensor of the model is used after the call.
        """
        values = self._in_groups(memory).values
        return [
            other
            for group in dict.fromkeys(memory.of(each) for each in nodes)
            for other in values[group]
            if (self._is_outside(other) if other in nodes else other < node and self._is_used_after(node, other))
        ]

    def _is_outside(self, node: Node) -> bool:
        return node.op in _OUTSIDE or self._effects.of(node).returns_state

    def _is_used_after(self, node: Node, other: Node) -> bool:
        users = (user for user in other.users if user in self._kept)
        return self._is_outside(other) or any(user > node or user in self._marks for user in users)

    @cached_property
    def _marks(self) -> set[Node]:
        return set(self._graph.find_nodes(op="call_function", target=module_output))

    @cached_property
    def _memory_without_marks(self) -> MemoryGroups:
        # A mark of what a module has returned joins the memory of all that is in a tuple.
        return MemoryGroups(self._graph, self._effects, self._marks)

    @cached_property
    def _memory_of_other_inputs(self) -> MemoryGroups:
        """The same, if each module that may return one of its inputs for other inputs than the example does."""
        memory = MemoryGroups(self._graph, self._effects, self._marks)
        for call, source in self._possibly_returned:
            memory.join(call, source)
        return memory

    def only_read_until(self, node: Node) -> Node | None:
        """Return the first call that writes a value, if until then its memory is read by calls on the value alone.

        None where these may pass it on, where another value of that memory is read or written, or where the memory
        exists outside of this call.
        """
        if node.target is module_output or self._memory.is_external(node):
            return None
        writer = min(self._writers_after(node, self._memory), default=None)
        if writer is None or node not in self._effects.of(writer).writes or self._effects.of(writer).is_opaque:
            return None
        group = self._memory.of(node)
        for source in self._in_groups(self._memory).values[group]:
            readers = [each for each in source.users if each in self._kept and node < each < writer]
            if any(source is not node or node in self._effects.of(reader).shares for reader in readers):
                return None
        return writer

    def _writers_after(self, node: Node, memory: MemoryGroups) -> set[Node]:
        writers = self._in_groups(memory).writers
        return {writer for writer in writers.get(memory.of(node), ()) if writer > node}

    def _in_groups(self, memory: MemoryGroups) -> _KeptInGroups:
        found = self._known.get(memory)
        if found is None:
            found = self._known[memory] = _KeptInGroups({}, {})
            for node in self._graph.nodes:
                if node in self._kept:
                    found.values.setdefault(memory.of(node), []).append(node)
                    for group in memory.written_by(node):
                        found.writers.setdefault(group, []).append(node)
        return found

    @cached_property
    def _memory_as_copied(self) -> MemoryGroups:
        copies = {node for node in self._graph.nodes if self._effects.copies_if_needed(node)}
        return MemoryGroups(self._graph, self._effects, copies | self._marks)
