"""Describe a graph together with the graphs of the graph modules that it calls, which become folders."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from featx.drawing.leaves import Describer, Leaf, find_target
from featx.drawing.scopes import Call, Scope, place_nodes
from featx.ir.graph import Graph
from featx.ir.node import Node
from featx.module import GraphModule


def describe_graph(
    describer: Describer, graph: Graph, module: nn.Module | None, around: Scope = ()
) -> Iterator[tuple[Leaf, Scope]]:
    """Yield what is drawn of each node and the module calls around it, in the order in which nodes are drawn.

    A call of a graph module, as splitting leaves them after, is replaced by the nodes of its graph: its inputs read
    what the call passes, and who reads the call reads its output.
    """
    describer.begin(graph, module)
    for node, scope in place_nodes(graph):
        inner = inner_module(node, module)
        if inner is None:
            yield describer.describe(node, module), (*around, *scope) if around else scope
            continue
        path = ".".join([*[call.path for call in around if call.is_graph], str(node.target)])
        call = Call(f"{path} as {node.name}", path, inner._get_name(), is_graph=True)
        describer.enter(node, inner.graph)
        yield from describe_graph(describer, inner.graph, inner, (*around, *scope, call))
        describer.leave(node, inner.graph)


def inner_module(node: Node, module: nn.Module | None) -> GraphModule | None:
    """Return the graph module that a node calls, if it does and there is something in it."""
    if node.op != "call_module":
        return None
    called = find_target(module, node)
    return called if isinstance(called, GraphModule) and len(called.graph.nodes) else None


def nested_graphs(graph: Graph, module: nn.Module | None) -> Iterator[tuple[Graph, nn.Module | None]]:
    """Yield a graph and those of the graph modules that it calls, at any depth, with what runs them."""
    yield graph, module
    for node in graph.nodes:
        inner = inner_module(node, module)
        if inner is not None:
            yield from nested_graphs(inner.graph, inner)
