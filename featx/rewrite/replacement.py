"""A replacement, prepared to be copied into a graph once for each match."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from featx.errors import PatternError
from featx.ir.arguments import leaves_of
from featx.ir.effects import CallEffects, Effects
from featx.ir.graph import Graph
from featx.ir.node import Node
from featx.rewrite.pattern import Pattern
from featx.rewrite.wildcards import Wildcard


class Replacement:
    """A graph that takes the inputs of a pattern and returns what stands in for its outputs.

    `nodes` are its operations, `outputs` pairs each node that the pattern returns with the node or constant that
    replaces it, and `returned` has those nodes; `sources[node]` is the node of the pattern that an operation helps to
    replace; `used` are the inputs that it reads, `targets` the paths, each with a node. `roots` and `writes` are what
    `memory_of` says; `is_pure` says that its operations do nothing but compute, and `is_separate` that what it returns
    shares no memory with anything. Made in O(nodes + edges).

    Raises:
        PatternError: inputs or outputs are not those of the pattern, or there is a wildcard in it.
    """

    def __init__(self, graph: Graph, root: nn.Module | None, pattern: Pattern) -> None:
        self.graph, self.root = graph, root
        self.placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        self.nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
        if len(self.placeholders) != len(pattern.placeholders):
            raise PatternError(
                f"the pattern has the inputs {_names(pattern.placeholders)} and the replacement "
                f"{_names(self.placeholders)}; give it as many, used or not"
            )
        for node in self.nodes:
            for value in (node.target, *leaves_of((node.args, node.kwargs))):
                if isinstance(value, Wildcard):
                    raise PatternError(
                        f"node '{node.name}' of the replacement has the wildcard {value!r}, which only a pattern can "
                        "have; make it an input of pattern and replacement to hand on what was matched"
                    )
        self.outputs = self._pair_outputs(pattern)
        self.targets = {node.target: node for node in self.nodes if node.op in ("call_module", "get_attr")}
        self.returned = {value for _, value in self.outputs if isinstance(value, Node)}
        self.used = [node for node in self.placeholders if node.users]
        self.sources = self._find_sources()
        effects = Effects(graph, root)
        self.is_pure = not any(has_effect(effects.of(node)) for node in self.nodes)
        self.roots, self.writes = memory_of(self.nodes, effects)
        self.is_separate = not self.writes and self._returns_fresh_values()

    def _pair_outputs(self, pattern: Pattern) -> list[tuple[Node, Any]]:
        wanted = list(leaves_of(pattern.graph.output_node().args[0]))
        given = list(leaves_of(self.graph.output_node().args[0]))
        if len(wanted) != len(given):
            wanted = list[Any](pattern.returning)
        if len(wanted) != len(given):
            raise PatternError(
                f"the pattern returns {_names(wanted)} and the replacement {_names(given)}; "
                "let both return the same number of values"
            )
        outputs: dict[Node, Any] = {}
        for node, value in zip(wanted, given, strict=True):
            if not isinstance(node, Node):
                continue
            if outputs.setdefault(node, value) is not value:
                raise PatternError(
                    f"the pattern returns '{node.name}' twice, and the replacement '{outputs[node]}' and '{value}' for "
                    "it; return one value for both"
                )
            if node.op == "placeholder" and value is not self.placeholders[pattern.placeholders.index(node)]:
                raise PatternError(
                    f"the pattern returns its input '{node.name}', and the replacement something else ('{value}') in "
                    "its place; what others make of that input is not part of a match, so return the input"
                )
        return [(node, value) for node, value in outputs.items() if node.op != "placeholder"]

    def _returns_fresh_values(self) -> bool:
        roots = [root for value in self.returned for root in self.roots.get(value) or {value}]
        is_one_each = len(self.returned) == len(self.outputs) and len(set(roots)) == len(roots)
        return is_one_each and all(root.op not in ("placeholder", "get_attr") for root in roots)

    def _find_sources(self) -> dict[Node, Node]:
        sources: dict[Node, Node] = {}
        for node, value in self.outputs:
            if isinstance(value, Node):
                sources.setdefault(value, node)
        for node in reversed(self.nodes):
            source = sources.setdefault(node, self.outputs[0][0])
            for operand in node.all_input_nodes:
                sources.setdefault(operand, source)
        return sources


def memory_of(nodes: Iterable[Node], effects: Effects) -> tuple[dict[Node, frozenset[Node]], frozenset[Node]]:
    """Return which memory the values of `nodes` may share, and which memory from outside the nodes write.

    The first is, for each node, the nodes before `nodes` or among them that the memory comes from. What is only
    feared of code that is not known does not count, nor that operands of Python's operators may be lists.
    O(nodes + edges).
    """
    roots: dict[Node, frozenset[Node]] = {}
    written: set[Node] = set()
    inside: set[Node] = set()
    for node in nodes:
        found = effects.of(node)
        own: frozenset[Node] = frozenset()
        if not found.is_opaque:
            for source in found.writes if found.shares_if_container else found.shares:
                own |= roots.get(source) or {source}
            for source in found.writes:
                written |= roots.get(source) or {source}
        roots[node] = own or frozenset({node})
        if node.op != "get_attr":
            inside.add(node)
    return roots, frozenset(written - inside)


def has_effect(found: CallEffects) -> bool:
    """Say whether a call does anything besides computing its value."""
    return found.is_random or found.has_side_effects


def _names(values: Iterable[Any]) -> str:
    return f"({', '.join([str(value) for value in values])})"
