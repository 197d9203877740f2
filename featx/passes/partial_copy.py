"""Copy some nodes of a graph into a graph of their own, which gets what they read from outside as inputs."""

from __future__ import annotations

from typing import Any

from featx.ir.arguments import Argument, map_arg
from featx.ir.graph import Graph
from featx.ir.node import Node
from featx.passes.modes import Modes, ModeWriter

# What is true of a call, or of the place of an input in a signature, and not of what stands for its value elsewhere.
_OF_THE_NODE = frozenset(
    {
        "effects", "is_guard", "is_check_of_input", "is_form_check", "form_follows_from", "possible_state_writes",
        "is_opaque_module", "opaque_because", "is_wrapped", "keyword_only", "left_attributes", "call_site",
    }
)  # fmt: skip


class PartialCopy:
    """A new graph with copies of nodes of another one, each in the mode that it had there.

    Nodes are added in an order in which they can run. `meta` is copied along.
    """

    def __init__(self, original: Graph, modes: Modes | None = None) -> None:
        self.graph = Graph(tracer_cls=original.tracer_cls)
        self._modes = modes
        self._writer = ModeWriter(self.graph)
        self._copies: dict[Node, Node] = {}

    def has(self, node: Node) -> bool:
        """Say whether something stands for `node` in the new graph."""
        return node in self._copies

    def of(self, node: Node) -> Node:
        """Return what stands for `node` in the new graph."""
        return self._copies[node]

    def add(self, node: Node) -> Node:
        """Copy `node`, all inputs of which are there, and return the copy.

        Raises:
            PassError: the node runs in a mode that cannot be set again.
        """
        if self._modes is not None and node.op != "get_attr":
            self._writer.switch_to(self._modes.at(node), node)
        copy = self._copies[node] = self.graph.node_copy(node, self._copies.__getitem__)
        return copy

    def add_input(self, node: Node, name: str) -> None:
        """Let an input of this name stand for the value of `node`."""
        # The generated code calls the module "self".
        placeholder = self.graph.placeholder("self_" if name == "self" else name, node.type)
        self.let_stand_for(node, placeholder)

    def let_stand_for(self, node: Node, other: Node) -> None:
        """Let `other`, a node of the new graph that computes the value of `node`, have its `meta` and stand for it."""
        other.meta = meta_of_value(node)
        self._copies[node] = other

    def finish(self, value: Argument) -> Graph:
        """End with what stands for `value`, in the mode of the caller, and return the graph."""
        self._writer.switch_back()
        self.graph.output(map_arg(value, self._copies.__getitem__))
        return self.graph


def meta_of_value(node: Node) -> dict[str, Any]:
    """Return the `meta` of a node that has the value of `node` without computing it."""
    return {key: value for key, value in node.meta.items() if key not in _OF_THE_NODE}
