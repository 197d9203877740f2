"""Compute once what a graph computes twice."""

from __future__ import annotations

from typing import Any

import torch

from featx.ir.node import Node
from featx.ir.repeatable import depends_on_mode
from featx.ir.rewiring import replace_inputs
from featx.module import GraphModule, check_graph_module
from featx.passes.accesses import Accesses
from featx.passes.modes import Modes
from featx.tracing.guards.guards import require_mode


def eliminate_common_subexpressions(gm: GraphModule) -> bool:
    """Let one call stand for all that compute the same: equal targets and arguments, nothing written between them.

    Taken are reads of attributes, functions and operators that are known only to compute a value, and modules of torch
    that do so in the mode in which they are; if that differs between train and eval mode, the graph checks the mode
    from then on. Left alone are values that somebody writes, before or after, and pairs that are both returned, so
    that the caller does not get one tensor twice. The first call stays, under its name. Returns whether anything was
    merged. O(nodes + edges).
    """
    merging = _Merging(check_graph_module(gm))
    for node in gm.graph.nodes:
        merging.visit(node)
    for node in reversed(merging.replacements):
        gm.graph.erase_node(node)
    if merging.used_mode:
        require_mode(gm.graph, gm.training, "calls of modules were merged: make the graph anew for the other mode")
    return bool(merging.replacements)


class _Merging:
    """Goes through the nodes of `gm` in order; `replacements` maps those that were seen before to the first ones."""

    def __init__(self, gm: GraphModule) -> None:
        self.replacements: dict[Node, Node] = {}
        self.used_mode = False
        self._gm = gm
        self._accesses = Accesses(gm)
        self._modes = Modes(gm.graph, self._accesses)
        self._returned = {self._accesses.cell_of(node) for node in gm.graph.output_node().all_input_nodes}
        # By what it computes: the first node, and what would be written between nodes in the other mode.
        self._first: dict[Any, tuple[Node, dict[int, int]]] = {}
        # How often each cell was written so far, and would have been in the other mode.
        self._writes: dict[int, int] = {}
        self._other_writes: dict[int, int] = {}

    def visit(self, node: Node) -> None:
        key = self._key(node)
        replace_inputs(node, self.replacements)
        if key is not None:
            others = {cell: self._other_writes.get(cell, 0) for cell in self._accesses.reads(node)}
            first, others_then = self._first.setdefault(key, (node, others))
            if first is not node and self._can_merge(first, node):
                self.replacements[node] = first
                self.used_mode = self.used_mode or others != others_then
        for cell in self._accesses.writes(node):
            self._writes[cell] = self._writes.get(cell, 0) + 1
        for cell in self._accesses.writes_in_other_mode(node):
            self._other_writes[cell] = self._other_writes.get(cell, 0) + 1

    def _key(self, node: Node) -> Any:
        """Return what is equal for nodes that compute the same; None where that is not known."""
        accesses = self._accesses
        if node.op in ("placeholder", "output") or not accesses.repeatable.has(node) or accesses.is_written(node):
            return None
        written = frozenset([(cell, self._writes[cell]) for cell in accesses.reads(node) if cell in self._writes])
        arguments = (self._frozen(node.args), self._frozen(node.kwargs))
        key = (node.op, node.target, arguments, written, self._modes.at(node))
        try:
            hash(key)
        except TypeError:
            return None  # an argument that has no hash
        return key

    def _frozen(self, value: Any) -> Any:
        """Return `value` as something that is equal only for values of one type, with the same sign of zero."""
        if isinstance(value, Node):
            return self.replacements.get(value, value)
        if isinstance(value, torch.Tensor):
            return ("tensor", id(value))
        if isinstance(value, (tuple, list)):
            return (type(value), tuple([self._frozen(item) for item in value]))
        if isinstance(value, dict):
            return (dict, tuple([(key, self._frozen(item)) for key, item in value.items()]))
        if isinstance(value, slice):
            return (slice, self._frozen(value.start), self._frozen(value.stop), self._frozen(value.step))
        return (type(value), repr(value) if isinstance(value, (float, complex)) else value)

    def _can_merge(self, first: Node, node: Node) -> bool:
        one, other = self._accesses.cell_of(first), self._accesses.cell_of(node)
        if one in self._returned and other in self._returned:
            return False
        module = self._accesses.effects.module_of(node) if node.op == "call_module" else None
        if module is not None and depends_on_mode(module):
            if any(part.training is not self._gm.training for part in module.modules()):
                return False
            self.used_mode = True
        if other in self._returned:
            self._returned.add(one)
        return True
