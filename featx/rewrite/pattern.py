"""A pattern, prepared for the search: where a match starts, and how to get from one output to the next."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from torch import nn

from featx.errors import ArgumentTypeError, PatternError
from featx.ir.graph import Graph
from featx.ir.node import Node
from featx.module import GraphModule
from featx.tracing.symbolic.tracer import Tracer

# What may be given as a pattern or as a replacement.
Source: TypeAlias = Callable[..., Any] | nn.Module | Graph


def graph_of(source: Source, what: str) -> tuple[Graph, nn.Module | None]:
    """Return the graph of a pattern or replacement, and the module that has its targets.

    Functions and modules are traced symbolically. A `Graph` is taken as it is; its module may be unknown. `what` says
    in messages what `source` is.

    Raises:
        ArgumentTypeError: `source` is nothing of the kind.
        TraceError: it cannot be traced.
    """
    if isinstance(source, GraphModule):
        return source.graph, source
    if isinstance(source, Graph):
        return source, source.owning_module
    if not callable(source):
        raise ArgumentTypeError(
            f"the {what} must be a function, a module or a featx Graph or GraphModule, got {type(source).__name__}"
        )
    tracer = Tracer()
    graph = tracer.trace(source)
    return graph, tracer.root


def without_guards(graph: Graph) -> Graph:
    """Return `graph`, or, where a tracer left guards in it, a copy without them and what only they read.

    Guards say for which inputs a trace holds. The graph that is searched has its own.
    """
    if not any(node.meta.get("is_guard") for node in graph.nodes):
        return graph
    root = graph.owning_module
    graph = copy.deepcopy(graph)
    graph.owning_module = root
    only_guarded: set[Node] = set()
    for node in reversed(graph.nodes):
        if node.meta.get("is_guard") or (node in only_guarded and not node.users and node.op != "placeholder"):
            only_guarded.update(node.all_input_nodes)
            graph.erase_node(node)
    return graph


@dataclasses.dataclass(frozen=True, eq=False)
class Link:
    """A way from a node of the pattern down to an anchor: `path` are the readers that lead there, the anchor last."""

    start: Node
    path: tuple[Node, ...]


class Pattern:
    """A graph to look for.

    `placeholders` are its inputs, `returning` the nodes that it returns, each once, `anchors` those of them that
    nothing else in it reads: a match is followed from there to the inputs. `links[k]` are the ways to the anchor `k`
    from what the anchors before it reach; `attributes` call modules or read tensors. Made in O(nodes + edges).

    Raises:
        PatternError: the graph computes nothing, or has an input or a node that its outputs do not depend on.
    """

    def __init__(self, graph: Graph, root: nn.Module | None, *, match_output: bool = False) -> None:
        self.graph = graph
        self.root = root
        if not len(graph.nodes):
            raise PatternError("the pattern is an empty graph; it needs an operation to look for and an output")
        output = graph.output_node()
        self.placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        self.returning = output.all_input_nodes
        self.anchors = [output] if match_output else [node for node in self.returning if len(node.users) == 1]
        self.attributes = [node for node in graph.nodes if node.op in ("call_module", "get_attr")]
        self._check()
        self.links = self._link()

    def _check(self) -> None:
        if all(node.op in ("placeholder", "output") for node in self.graph.nodes):
            raise PatternError(
                f"the pattern ({self._describe()}) computes nothing, so it would match everything; "
                "let it call the operations to look for"
            )
        for node in self.anchors:
            if node.op == "placeholder":
                raise PatternError(
                    f"the pattern returns its input '{node.name}' and does nothing with it, so any value would match; "
                    "return only what the pattern computes"
                )
        needed = {node for tree in self._trees() for node in tree}
        for node in self.graph.nodes:
            if node not in needed and node.op == "placeholder":
                raise PatternError(f"the pattern does not use its input '{node.name}'; remove that input")
            if node not in needed and node.op != "output":
                raise PatternError(
                    f"no output of the pattern depends on its node '{node.name}', so it cannot be found; remove it, or "
                    "return its result (an in-place call can be written as `x = x.add_(1)`)"
                )

    def _describe(self) -> str:
        return ", ".join([f"{node.op} '{node.name}'" for node in self.graph.nodes])

    def _trees(self) -> Iterator[dict[Node, Node | None]]:
        """Yield for each anchor what it, and none before it, depends on, each with the reader that led there."""
        seen: set[Node] = set()
        for anchor in self.anchors:
            tree: dict[Node, Node | None] = {anchor: None}
            waiting = [anchor]
            while waiting:
                node = waiting.pop()
                for source in node.all_input_nodes:
                    if source not in seen and source not in tree:
                        tree[source] = node
                        waiting.append(source)
            seen.update(tree)
            yield tree

    def _link(self) -> list[list[Link]]:
        links: list[list[Link]] = []
        reached: set[Node] = set()
        for tree in self._trees():
            found: dict[Node, Link] = {}
            for node in tree:
                for start in node.all_input_nodes:
                    if start in reached and start not in found:
                        found[start] = Link(start, tuple(_down(node, tree)))
            # Inputs last: much in the graph may read what they stand for.
            links.append(sorted(found.values(), key=lambda link: link.start.op == "placeholder"))
            reached.update(tree)
        return links


def _down(node: Node | None, tree: dict[Node, Node | None]) -> Iterator[Node]:
    while node is not None:
        yield node
        node = tree[node]
