"""Turn the names in a request into nodes of a graph."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from featx.errors import DrawnAwayError, NodeNameError
from featx.features.building.decisions import branches_on_random
from featx.features.requests.attention import FUSED_FUNCTIONS
from featx.features.requests.request import (
    OUTPUT,
    OUTPUT_ELSEWHERE,
    PROBABILITIES,
    Request,
    as_probabilities,
    hint_of_part,
)
from featx.ir.graph import Graph
from featx.ir.node import Node
from featx.ir.paths import did_you_mean, parents_of
from featx.tracing.nodes.naming import CallSite


def select(
    graph: Graph, request: Mapping[str, str], owner: str, sites: Mapping[str, CallSite] = MappingProxyType({})
) -> dict[str, Node]:
    """Return the requested nodes by key, in the order of the request.

    A name is the path of a module, which means what its last call returned, or, for a module that is not called itself
    such as a `ModuleList`, what the last module called in it returned; or it is that of a node, which for a module that
    is one node is its first call; or any other prefix of names, which means the last node under it. Names are compared
    whole, part by part; they are not patterns. Names that a `Request` has from a pattern may be missing, but not all of
    one pattern. `"output"` is what the model returns, if the graph has a mark of it. O(nodes * depth).

    Args:
        graph: a traced graph, whose nodes have qualified names, and marks of what the requested modules returned.
        request: node names to keys.
        owner: what the names belong to, for messages: `ResNet (eval)`.
        sites: which calls in the code of the model names meant in an earlier graph, where these run or do not, so that
            numbers in names may mean other calls here.

    Raises:
        NodeNameError: the graph has no such name, or not the call that it meant.
    """
    last_under: dict[str, Node] = {}
    # What modules inside of others returned last. An inner call returns before the one around it.
    last_returned: dict[str, Node] = {}
    exact: dict[str, Node] = {}
    at_site: dict[tuple[str, int, int], Node] = {}
    # Of several calls of a module the last one counts.
    returned: dict[str, Node] = {}
    for node in graph.nodes:
        marks: tuple[str, ...] = node.meta.get("returned_by", ())
        returned.update(dict.fromkeys(marks, node))
        for path in (*marks, *([str(node.target)] if node.op == "call_module" else ())):
            last_returned.update(dict.fromkeys(parents_of(path), node))
        if node.op == "call_module" and node.target in returned:  # an earlier call of it was looked into
            returned[str(node.target)] = node
        name: str | None = node.meta.get("qualified_name")
        if name is None:
            continue
        exact[name] = node
        if sites and "call_site" in node.meta:
            at_site[node.meta["call_site"][:3]] = node
        last_under.update(dict.fromkeys(parents_of(name), node))
    found: dict[str, Node] = {}
    for name, key in request.items():
        node = returned.get(name) or exact.get(name) or last_returned.get(name) or last_under.get(name)
        if node is None and name == OUTPUT:
            node = returned.get("")
        if name in sites:
            node = at_site.get(sites[name][:3]) or (node if _may_stand_for(node, sites[name]) else None)
        if node is not None:
            found[key] = node
        elif not isinstance(request, Request) or name not in request.optional:
            raise _unknown_name(name, [*exact, *last_under], owner, graph, request)
    for pattern, names in request.expanded.items() if isinstance(request, Request) else ():
        if names and not any(request[name] in found for name in names):
            raise _unknown_name(names[0], [*exact, *last_under], f"{owner}, which '{pattern}' matches", graph, request)
    return found


def _may_stand_for(node: Node | None, site: CallSite) -> bool:
    """Say whether a call elsewhere in the code may be in another branch of an `if`: each branch makes as many."""
    found: CallSite | None = None if node is None else node.meta.get("call_site")
    return found is not None and site.total is not None and found.total == site.total


IN_ONE_MODE = "; a name may exist in one mode only, then give train_return_nodes and eval_return_nodes"


def _unknown_name(name: str, known: list[str], owner: str, graph: Graph, request: Mapping[str, str]) -> NodeNameError:
    hint = did_you_mean(name, known)
    if not hint and request[name] in known:
        hint = f" A request goes from names to keys: {{'{request[name]}': '{name}'}}."
    if not hint and name in OUTPUT_ELSEWHERE:
        hint = f" What the model returns is '{OUTPUT}'."
    module, _, last = name.rpartition(".")
    is_fused = any(f"{module}.{each}".lstrip(".") in known for each in FUSED_FUNCTIONS)
    probabilities = as_probabilities(name)
    hint = hint_of_part(name, known) or hint
    if is_fused and probabilities is not None:
        hint = f" Attention is fused there; ask for its probabilities by '{probabilities}'."
    elif is_fused and last == PROBABILITIES:
        hint = (
            " Attention is fused there: its probabilities can be requested and not edited. Let the model compute them, "
            "with fused_attn=False of timm or attn_implementation='eager' of transformers."
        )
    reasons = {str(node.target): node.meta["opaque_because"] for node in graph.nodes if "opaque_because" in node.meta}
    kept_whole = "".join(
        f" '{path}' is one node with all that it runs: {reasons[path].rstrip(' ,')}." for path in reasons
    )
    text = (
        f"No node '{name}' in {owner}.{hint}{kept_whole} List all names with "
        f"featx.get_graph_node_names(model){IN_ONE_MODE}."
    )
    if branches_on_random(graph):
        text = f"{text} The model decides by random numbers what runs, so another trace may have it."
        return DrawnAwayError(text, name, tuple(reasons))
    return NodeNameError(text, name, tuple(reasons))


def names_of(graph: Graph) -> list[str]:
    """Return the qualified names in a traced graph, in execution order."""
    return [node.meta["qualified_name"] for node in graph.nodes if "qualified_name" in node.meta]
