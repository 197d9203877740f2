"""What stands for a model in a mode in which it cannot be traced: a graph that says so when it runs."""

from __future__ import annotations

from typing import NoReturn

from featx.errors import TraceError
from featx.ir.graph import Graph


def raising_graph(like: Graph, error: Exception, mode: str) -> Graph:
    """Return a graph with the inputs of `like` that raises when it runs, because of `error`. O(inputs)."""
    graph = Graph(tracer_cls=like.tracer_cls)
    for node in like.find_nodes(op="placeholder"):
        graph.node_copy(node)
    graph.call_function(raise_mode_not_traceable, (mode, f"{type(error).__name__}: {error}"))
    graph.output({})
    return graph


def is_raising(graph: Graph) -> bool:
    """Say whether a graph is one of `raising_graph`. O(1)."""
    return bool(graph.find_nodes(op="call_function", target=raise_mode_not_traceable))


def raise_mode_not_traceable(mode: str, reason: str) -> NoReturn:
    """Raise what kept a model from being traced in this mode.

    Raises:
        TraceError: always.
    """
    raise TraceError(
        f"this extractor has no graph for {mode} mode: tracing in this mode failed on the example that was "
        f"used: {reason}"
    )
