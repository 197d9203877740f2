"""Find out which calls of modules each node belongs to, and in which order to draw the nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from featx.ir.graph import Graph
from featx.ir.node import Node


@dataclass(frozen=True)
class Call:
    """One call of a module, as the trace saw it; `key` differs between two calls of one module.

    `is_graph` says that the graph calls it, and it runs a graph of its own.
    """

    key: int | str
    path: str
    type_name: str
    is_graph: bool = False


Scope = tuple[Call, ...]


def place_nodes(graph: Graph) -> list[tuple[Node, Scope]]:
    """Return the nodes in the order in which they are drawn, each with the module calls around it, outermost first.

    The order is that of the graph, except that attributes stand before their first reader, in its modules. A leaf
    module is not around its own node. Inputs and outputs are in no module; a node whose `meta` says nothing is where
    both its neighbours are. O(nodes * depth).
    """
    attributes: dict[Node, list[Node]] = {}
    order: list[Node] = []
    for node in graph.nodes:
        if node.op == "get_attr" and node.users:
            attributes.setdefault(min(node.users), []).append(node)
        else:
            order.append(node)
    calls: dict[int, Call] = {}
    known = [_scope_of(node, calls) for node in order]
    placed: list[tuple[Node, Scope]] = []
    for node, scope in zip(order, _fill_gaps(known), strict=True):
        placed += [(attribute, scope) for attribute in attributes.get(node, ())]
        placed.append((node, scope))
    return placed


def _scope_of(node: Node, calls: dict[int, Call]) -> Scope | None:
    """Read the module calls around a node from its `meta`; None where it does not say."""
    if node.op in ("placeholder", "output"):
        return ()
    stack: object = node.meta.get("nn_module_stack")
    if not isinstance(stack, Mapping):
        return None
    scope: list[Call] = []
    for key, entry in cast(Mapping[Any, Any], stack).items():
        # A tracer makes one entry for each call and shares it among the nodes inside, so identity tells calls apart.
        call = calls.get(id(entry))
        if call is None:
            call = calls[id(entry)] = _read_entry(key, entry)
        if call.path:
            scope.append(call)
    if scope and node.op == "call_module" and scope[-1].path == node.target:
        scope.pop()
    return tuple(scope)


def _read_entry(key: object, entry: object) -> Call:
    path, kind = cast(tuple[Any, Any], entry) if isinstance(entry, tuple) and len(cast(Any, entry)) == 2 else (key, "")
    type_name = kind.__name__ if isinstance(kind, type) else str(kind).rpartition(".")[2]
    return Call(id(cast(object, entry)), str(path), type_name)


def _fill_gaps(scopes: list[Scope | None]) -> list[Scope]:
    """Put what is None where its neighbours on both sides are."""
    following: list[Scope] = []
    after: Scope = ()
    for scope in reversed(scopes):
        after = after if scope is None else scope
        following.append(after)
    filled: list[Scope] = []
    before: Scope = ()
    for scope, after in zip(scopes, reversed(following), strict=True):
        before = before[: shared_depth(before, after)] if scope is None else scope
        filled.append(before)
    return filled


def shared_depth(first: Scope, second: Scope) -> int:
    """Return how many of the outermost calls of two scopes are the same."""
    depth = 0
    for one, other in zip(first, second, strict=False):
        if one is not other and one != other:
            break
        depth += 1
    return depth
