"""Turn the names in a request into nodes of a graph."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, cast

from featx.errors import ArgumentTypeError, DrawnAwayError, NodeNameError, RequestError
from featx.features.decisions import decides_by_draws
from featx.ir.graph import Graph
from featx.ir.node import Node


def as_request(return_nodes: Any, argument: str) -> dict[str, str]:
    """Return a request as a dict from node names to the keys of the result.

    Raises:
        ArgumentTypeError: it is neither a dict nor a list of names.
        RequestError: it is empty, or gives one key to two nodes.
    """
    if isinstance(return_nodes, Mapping):
        request = {str(name): str(key) for name, key in cast(Mapping[Any, Any], return_nodes).items()}
    elif isinstance(return_nodes, Iterable) and not isinstance(return_nodes, (str, bytes)):
        request = {str(name): str(name) for name in cast(Iterable[Any], return_nodes)}
    else:
        raise ArgumentTypeError(
            f"{argument} must be a list of node names or a dict from node names to keys, got {return_nodes!r}"
        )
    if not request:
        raise RequestError(f"{argument} is empty; name at least one node, such as {argument}={{'layer4': 'C5'}}")
    keys = list(request.values())
    for key in keys:
        if keys.count(key) > 1:
            names = [name for name, other in request.items() if other == key]
            raise RequestError(f"{argument} gives the key '{key}' to {names}; each node needs a key of its own")
    return request


def select(graph: Graph, request: Mapping[str, str], owner: str) -> dict[str, Node]:
    """Return the requested nodes by key, in execution order.

    A name is the path of a module, which means what its last call returned; or that of a node, which for a module that
    is one node is its first call; or any other prefix of names, which means the last node under it. Names are compared
    whole, part by part; they are not patterns. O(nodes * depth).

    Args:
        graph: a traced graph, whose nodes have qualified names, and marks of what the requested modules returned.
        request: node names to keys.
        owner: what the names belong to, for messages: `ResNet (eval)`.

    Raises:
        NodeNameError: the graph has no such name.
    """
    last_under: dict[str, Node] = {}
    exact: dict[str, Node] = {}
    # Of several calls of a module the last one counts.
    returned: dict[str, Node] = {}
    for node in graph.nodes:
        returned.update(dict.fromkeys(node.meta.get("returned_by", ()), node))
        name: str | None = node.meta.get("qualified_name")
        if name is None:
            continue
        exact[name] = node
        end = name.rfind(".")
        while end > 0:
            last_under[name[:end]] = node
            end = name.rfind(".", 0, end)
    found: dict[str, Node] = {}
    for name, key in request.items():
        node = returned.get(name) or exact.get(name) or last_under.get(name)
        if node is None:
            raise _unknown_name(name, [*exact, *last_under], owner, graph)
        found[key] = node
    return dict(sorted(found.items(), key=lambda item: item[1]))  # nodes compare by their place in the graph


def _unknown_name(name: str, known: list[str], owner: str, graph: Graph) -> NodeNameError:
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    hint = f" Did you mean {' or '.join(repr(match) for match in close)}?" if close else ""
    text = (
        f"No node '{name}' in {owner}.{hint}{_kept_whole(graph)} List all names with "
        "featx.get_graph_node_names(model); a name may exist in one mode only, then give train_return_nodes and "
        "eval_return_nodes."
    )
    if decides_by_draws(graph):
        return DrawnAwayError(f"{text} Here the model decides by random numbers what runs, so it may run next time.")
    return NodeNameError(text)


def _kept_whole(graph: Graph) -> str:
    reasons = {node.target: node.meta["whole_because"] for node in graph.nodes if "whole_because" in node.meta}
    return "".join(f" '{path}' is one node with all that it runs: {reasons[path].rstrip(' ,')}." for path in reasons)
