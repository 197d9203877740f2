"""Whether a program of `torch.export` computes with integers, which OpenVINO does with 32 bits, and unchecked."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node

from featx.tree import tensors_in

# What moves integers and computes none.
_MOVING = frozenset(
    "view reshape _unsafe_view permute transpose t unsqueeze squeeze slice select narrow expand clone contiguous alias "
    "detach detach_ flatten unflatten cat stack repeat chunk split unbind lift_fresh_copy".split()
)
# What makes integers of Python's numbers alone.
_MAKING = frozenset("arange full zeros ones zeros_like ones_like full_like".split())
_CASTS = frozenset({"to", "_to_copy"})
# They look up values by integers, which raises in PyTorch where there are none.
_LOOKUPS = frozenset(
    "index index_select gather take scatter index_put index_add index_copy scatter_add embedding_bag".split()
)


def integers_of_tables(program: torch.export.ExportedProgram) -> list[tuple[int, int]] | None:
    """Return which inputs are looked up in tables, and of how many rows; None where more is done. O(nodes).

    More is arithmetic with integers, lookups of other kinds by integers of inputs, and casts to integers of anything
    but integers and booleans. The rest of a division by a number is no more, and neither is the number of what is true.
    """
    given = {spec.arg.name for spec in program.graph_signature.input_specs if spec.kind.name == "USER_INPUT"}
    inputs = [node for node in program.graph.nodes if node.op == "placeholder" and node.name in given]
    # Of each node: the places of the inputs whose integers it moves.
    moved: dict[Node, set[int]] = {node: {place} for place, node in enumerate(inputs) if _is_of_integers(node)}
    # Below which number integers are that are computed; infinity where that is not known.
    limits: dict[Node, float] = {}
    tables: list[tuple[int, int]] = []
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        schema = getattr(node.target, "_schema", None)  # functions of Python have none: `getitem` of several results
        name = "" if schema is None else str(schema.name).removeprefix("aten::")
        sources = {place for each in node.all_input_nodes for place in moved.get(each, ())}
        limit = max((limits.get(each, 0) for each in node.all_input_nodes), default=0)
        if name == "embedding":
            rows = int(node.args[0].meta["val"].shape[0])
            if limits.get(node.args[1], 0) > rows:
                return None
            tables += [(place, rows) for place in moved.get(node.args[1], ())]
        elif name in _LOOKUPS and (sources or limit) and any(map(_is_of_integers, _nodes(node.args[1:]))):
            return None
        elif _is_of_integers(node):
            if name == "remainder" and type(node.args[1]) is int:
                limits[node] = abs(node.args[1])
            elif name == "sum" and not _is_of_integers(node.args[0]) and not _is_of_floats(node.args[0]):
                limits[node] = math.inf
            elif name in _MOVING | _MAKING or not name or (name in _CASTS and not _is_of_floats(node.args[0])):
                moved[node] = sources
                limits[node] = limit
            else:
                return None
    return tables


def _is_of_integers(node: Node) -> bool:
    values: list[torch.Tensor] = tensors_in(node.meta.get("val"))
    return any(not value.is_floating_point() and value.dtype is not torch.bool for value in values)


def _is_of_floats(value: Any) -> bool:
    return isinstance(value, Node) and any(each.is_floating_point() for each in tensors_in(value.meta.get("val")))


def _nodes(value: Any) -> Iterator[Node]:
    if isinstance(value, Node):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:  # pyright: ignore[reportUnknownVariableType]
            yield from _nodes(item)
