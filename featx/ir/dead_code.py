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
    if is_impure_node is not None:
        return _erase(graph, is_impure_node, lambda node: None)
    effects = _LastingEffects(graph)
    return _erase(graph, effects.has, effects.note_kept)


def _erase(graph: Graph, must_stay: Callable[[Node], bool], on_kept: Callable[[Node], None]) -> bool:
    changed = False
    for node in reversed(graph.nodes):
        if not node.users and node.op not in ("placeholder", "output") and not must_stay(node):
            graph.erase_node(node)
            changed = True
        else:
            on_kept(node)
    return changed


class _LastingEffects:
    """Says which nodes that nothing reads have an effect that can be seen later. It is asked from the end backwards.

    A write alone has one only if a node that is kept reads the written memory after it, or if the caller or the model
    holds that memory.
    """

    def __init__(self, graph: Graph) -> None:
        self._effects = Effects(graph)
        self._read_later: set[int] = set()
        has_writes = any(self._effects.of(node).writes for node in graph.nodes)
        # Any writer may lose its readers while dead code goes.
        self._memory = MemoryGroups(graph, self._effects) if has_writes else None

    def note_kept(self, node: Node) -> None:
        """Take note that a node stays, so that what is written before it is read."""
        if self._memory is not None:
            self._read_later |= self._memory.read_by(node)

    def has(self, node: Node) -> bool:
        effects = self._effects.of(node)
        if effects.is_check or effects.is_random or effects.changes_global_state:
            return True
        if effects.writes_state or effects.leaves_attributes or may_write_literal(node, effects):
            return True
        memory = self._memory
        if memory is None:
            return False
        return any(memory.is_external(target) or memory.of(target) in self._read_later for target in effects.writes)
