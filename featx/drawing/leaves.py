"""Turn the nodes of a graph into what a picture says about them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from featx.drawing.call_text import CallText
from featx.drawing.costs import Costs, costs_by_node, numbers_in
from featx.drawing.forms import form_of
from featx.drawing.kinds import NUMBERS_OF_TENSORS, kind_of_call, kind_of_module
from featx.drawing.thumbnails import Thumbnail
from featx.errors import GraphError
from featx.ir.arguments import collect_nodes
from featx.ir.effects import Effects
from featx.ir.graph import Graph
from featx.ir.node import Node


@dataclass(eq=False, slots=True)
class Leaf:
    """What is drawn of a node. It holds nothing of the graph, which may be edited afterwards.

    Attributes:
        index: its place among the nodes that are drawn.
        name: its qualified name; where it has none, the path that it refers to, or its name in the graph.
        title: what it is called in the drawing: its name, but for attributes the path that they are at.
        label: the same inside the folder around it.
        kind: the family that gives the colour, see `kinds.py`.
        operation: the class of the module, or the short name of the function or method.
        call: the call as code, in which `⟨k⟩` stands for the input at position k.
        settings: what the module prints of itself.
        shape: lengths joined by ×, or "".
        parameters: numbers in the weights that it uses; new_parameters: those that no node before it uses.
        thumbnail: a picture of the map that it computes, where the graph was run on an image.
        is_minor: it is a number made of sizes, or serves only checks of what was seen on the example.
    """

    index: int
    name: str
    node_name: str
    has_qualified_name: bool
    kind: str
    operation: str
    inputs: tuple[int, ...]
    call: str
    settings: str = ""
    shape: str = ""
    dtype: str = ""
    source: str = ""
    parameters: int = 0
    new_parameters: int = 0
    costs: dict[str, float] = field(default_factory=lambda: dict[str, float]())
    thumbnail: Thumbnail | None = None
    is_minor: bool = False
    is_highlighted: bool = False
    title: str = ""
    label: str = ""
    input_names: tuple[str, ...] = ()

    def call_with_names(self) -> str:
        """Return the call with the names that the inputs have in the graph."""
        text = self.call
        for position, name in enumerate(self.input_names):
            text = text.replace(f"⟨{position}⟩", name)
        return text


class Describer:
    """Describes the nodes of a graph, and of those nested in it, in the order in which they are drawn.

    `costs` gives numbers for nodes, which are otherwise looked for in `node.meta["cost"]`; `outer` is the graph whose
    nodes it may name. `thumbnails` are pictures of what nodes have computed.
    """

    def __init__(
        self, outer: Graph, costs: Costs, highlight: set[Node], thumbnails: Mapping[Node, Thumbnail] | None = None
    ) -> None:
        self._outer = outer
        self._costs = costs_by_node(costs)
        self._highlight = highlight
        self._thumbnails = thumbnails or {}
        self._count = 0
        # Which leaf gives the value of a node, and which nodes a nested graph gets as an input.
        self._indices: dict[Node, int] = {}
        self._passed: dict[Node, list[Node]] = {}
        self._seen: set[int] = set()
        self._numbers: set[Node] = set()
        self._checks: set[Node] = set()
        self._calls = CallText()
        self._folders = sorted({f"{Path(entry).resolve()}/" for entry in sys.path}, key=len, reverse=True)
        self._sources: dict[str, str] = {}

    def begin(self, graph: Graph, module: nn.Module | None) -> None:
        """Find, before its nodes, what a graph only checks; `module` runs it, if something does. O(nodes + edges)."""
        effects, checks = Effects(graph, module), self._checks
        for node in reversed(graph.nodes):
            if node.op in ("output", "call_module") or "shape" in node.meta:
                continue
            if node.users:
                is_for_checks = all(user in checks for user in node.users)
            else:  # nothing reads the result of a check
                is_for_checks = node.op == "call_function" and effects.of(node).is_check
            if is_for_checks:
                checks.add(node)

    def enter(self, call: Node, graph: Graph) -> None:
        """Let the inputs of a nested graph read what `call` passes to it."""
        inputs = [node for node in graph.nodes if node.op == "placeholder"]
        for position, node in enumerate(inputs):
            passed: dict[Node, None] = {}
            given = call.args[position : position + 1] or (call.kwargs.get(node.target),)
            collect_nodes((call.args, call.kwargs) if node.target.startswith("*") else given, passed)
            self._passed[node] = list(passed)

    def leave(self, call: Node, graph: Graph) -> None:
        """Let the readers of `call` read what the nested graph returns."""
        self._indices[call] = self._indices[next(iter(reversed(graph.nodes)))]

    def describe(self, node: Node, module: nn.Module | None) -> Leaf:
        """Describe a node whose inputs have been described; `module` runs its graph. O(its arguments and weights).

        Raises:
            GraphError: an input stands after the node, or is in another graph.
        """
        inputs = self._passed.get(node) or node.all_input_nodes
        index = self._indices[node] = self._count
        self._count += 1
        meta = node.meta
        qualified: object = meta.get("qualified_name")
        usual = node.target if node.op in ("get_attr", "call_module") else node.name
        shape, dtype = form_of(meta)
        called = find_target(module, node)
        operation, call = self._calls.of(node, inputs)
        kind = self._kind(node, operation, called)
        leaf = Leaf(
            index,
            qualified if isinstance(qualified, str) else str(usual),
            node.name,
            isinstance(qualified, str),
            kind,
            operation if called is None else _class_of(called),
            tuple([self._index_of(item, node) for item in inputs]),
            call,
            input_names=tuple([item.name for item in inputs]),
            shape=shape,
            dtype=dtype,
            source=self._source(meta),
            costs=self._costs_of(node),
            thumbnail=self._thumbnails.get(node),
            is_minor=node in self._checks or kind == "number",
            is_highlighted=node in self._highlight,
        )
        leaf.title = str(node.target) if node.op == "get_attr" else leaf.name
        if isinstance(called, nn.Module):
            leaf.settings = called.extra_repr()
        self._count_parameters(leaf, called)
        return leaf

    def _index_of(self, item: Node, reader: Node) -> int:
        index = self._indices.get(item)
        if index is None:
            raise GraphError(
                f"node '{reader.name}' reads '{item.name}', which is not before it in this graph; see graph.lint()"
            )
        return index

    def _kind(self, node: Node, operation: str, called: object) -> str:
        if node.op in ("placeholder", "output"):
            return "io"
        if node in self._checks:
            return "check"
        if node.op == "get_attr":
            return "constant"
        if node.op == "call_module":
            return kind_of_module(called)
        if self._is_number(node, operation):
            self._numbers.add(node)
            return "number"
        # A class that is called packs values together, as transformers' outputs do.
        return "shape" if isinstance(node.target, type) else kind_of_call(operation)

    def _is_number(self, node: Node, operation: str) -> bool:
        """Say whether a call asks for a size, or computes with sizes alone."""
        if not node.args:
            return False
        if operation == "getattr":
            return node.args[1] in NUMBERS_OF_TENSORS
        if node.op == "call_method":
            return operation in NUMBERS_OF_TENSORS
        inputs = node.all_input_nodes
        is_arithmetic = getattr(node.target, "__module__", None) in ("_operator", "math", "builtins")
        return is_arithmetic and bool(inputs) and all(item in self._numbers for item in inputs)

    def _count_parameters(self, leaf: Leaf, called: object) -> None:
        tensors = called.parameters() if isinstance(called, nn.Module) else [called]
        for tensor in tensors:
            if isinstance(tensor, nn.Parameter) and not isinstance(tensor, nn.parameter.UninitializedParameter):
                leaf.parameters += tensor.numel()
                if id(tensor) not in self._seen:
                    self._seen.add(id(tensor))
                    leaf.new_parameters += tensor.numel()

    def _costs_of(self, node: Node) -> dict[str, float]:
        if self._costs is None:
            found = node.meta.get("cost")
            return {} if found is None else numbers_in(found, node.name)
        found = self._costs.get(node)
        if found is None and node.graph is self._outer:
            found = self._costs.get(node.name)
        return {} if found is None else numbers_in(found, node.name)

    def _source(self, meta: Mapping[str, Any]) -> str:
        source: object = meta.get("source") or meta.get("stack_trace")
        if not isinstance(source, str):
            return ""
        short = self._sources.get(source)
        if short is None:
            short = source.strip().rpartition("\n")[2].strip()
            # Where a package is installed says nothing about the model, and something about the machine.
            short = self._sources[source] = next(
                (short[len(folder) :] for folder in self._folders if short.startswith(folder)), short
            )
        return short


def find_target(module: nn.Module | None, node: Node) -> object:
    """Return the module or attribute that a node refers to, if it can be had."""
    if module is None or node.op not in ("call_module", "get_attr"):
        return None
    found: object = module
    for part in str(node.target).split("."):
        found = getattr(found, part, None)
    return found


def _class_of(called: object) -> str:
    if isinstance(called, nn.Module):
        return type(called).__name__
    if isinstance(called, torch.Tensor):
        return "parameter" if isinstance(called, nn.Parameter) else "buffer"
    return "attribute"
