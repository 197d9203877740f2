"""Erase the nodes of a graph whose absence changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from featx.ir.effects import Effects
from featx.ir.memory import MemoryGroups
from featx.ir.repeatable import may_write_literal

if TYPE_CHECKING:
    from featx.ir.graph import Graph
    from featx.ir.node import Node


def eliminate_dead_code(graph: Graph, is_impure_node: Callable[[Node], bool] | None = None) -> bool:
    """Erase, from the end backwards, what nothing reads and what has no lasting effect; as `Graph` says."""
    must_stay = is_impure_node or _LastingEffects(graph).has
    changed = False
    for node in reversed(graph.nodes):
        if not node.users and node.op not in ("placeholder", "output") and not must_stay(node):
            graph.erase_node(node)
            changed = True
    return changed


class _LastingEffects:
    """Says which nodes that nothing reads have an effect that can be seen later.

    A write alone has one only if the written memory is read after it, or is held by the caller or the model.
    """

    def __init__(self, graph: Graph) -> None:
        self._effects = Effects(graph)
        self._last_reads: dict[int, Node] = {}
        self._memory = None
        # Any writer may lose its readers while dead code goes.
        if any(self._effects.of(node).writes for node in graph.nodes):
            self._memory = memory = MemoryGroups(graph, self._effects)
            for node in graph.nodes:
                self._last_reads.update((memory.of(source), node) for source in node.all_input_nodes)

    def has(self, node: Node) -> bool:
        effects = self._effects.of(node)
        if effects.is_check or effects.is_random or effects.changes_global_state:
            return True
        if effects.writes_state or effects.leaves_attributes or may_write_literal(node, effects):
            return True
        memory = self._memory
        if memory is None:
            return False
        # The last read is taken before anything is erased: at worst a write stays that only dead code reads.
        return any(
            memory.is_external(target) or node < self._last_reads[memory.of(target)] for target in effects.writes
        )
