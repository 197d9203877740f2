"""Which nodes of a program of `torch.export` compute with integers, which OpenVINO does with 32 bits, and unchecked."""

from __future__ import annotations

import torch
from torch.fx import Node

from featx.interop.program_parts import calls_of, inputs_of
from featx.tree import tensors_in

# What moves integers and computes none.
_MOVING = frozenset(
    "view reshape _unsafe_view permute transpose t unsqueeze squeeze slice select narrow expand clone contiguous alias "
    "detach flatten unflatten cat stack repeat chunk split unbind lift_fresh_copy".split()
)
# What makes integers of Python's numbers alone.
_MAKING = frozenset("arange full zeros ones zeros_like ones_like full_like".split())
_CASTS = frozenset({"to", "_to_copy"})


def nodes_of_integers(program: torch.export.ExportedProgram) -> set[Node]:
    """Return the calls that compute with integers, and all calls whose results these take. O(nodes).

    Calls compute with integers that take integers of an input, or what was computed, as embeddings do; and those that
    compute integers, such as `argmax` and `ids % 11`. Integers of the model itself are no such ones, as long as they
    are only moved: bias tables of windows are looked up by them.
    """
    unknown = {node for node in inputs_of(program) if _is_of_integers(node)}
    found: set[Node] = set()
    for node in calls_of(program):
        schema = getattr(node.target, "_schema", None)
        if schema is None:  # a function of Python: `getitem` of several results
            computes = not found.isdisjoint(node.all_input_nodes)
        else:
            computes = not unknown.isdisjoint(node.all_input_nodes) or not _only_moves(node, schema.name)
        if computes:
            found.add(node)
            if _is_of_integers(node):
                unknown.add(node)
    return _with_their_results(program, _with_ancestors(found))


def _only_moves(node: Node, name: str) -> bool:
    """Say whether a call computes no integers."""
    if not _is_of_integers(node):
        return True
    name = name.removeprefix("aten::")
    is_cast = name in _CASTS and all(map(_is_of_integers, node.all_input_nodes))
    return is_cast or name in _MOVING or name in _MAKING


def _is_of_integers(node: Node) -> bool:
    values: list[torch.Tensor] = tensors_in(node.meta.get("val"))
    return any(not value.is_floating_point() and value.dtype is not torch.bool for value in values)


def _with_ancestors(nodes: set[Node]) -> set[Node]:
    found = set(nodes)
    waiting = list(nodes)
    while waiting:
        for each in waiting.pop().all_input_nodes:
            if each.op == "call_function" and each not in found:
                found.add(each)
                waiting.append(each)
    return found


def _with_their_results(program: torch.export.ExportedProgram, calls: set[Node]) -> set[Node]:
    """Return calls with those that take one of several results out of theirs."""
    results = [node for node in calls_of(program) if not hasattr(node.target, "_schema")]
    return calls.union(node for node in results if not calls.isdisjoint(node.all_input_nodes))
