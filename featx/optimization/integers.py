"""Whether a program of `torch.export` computes with integers, which OpenVINO does with 32 bits, and unchecked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node

from featx.tree import tensors_in

aten = torch.ops.aten
# What moves integers and computes none.
_MOVING = frozenset(
    {
        aten.view, aten.reshape, aten._unsafe_view, aten.permute, aten.transpose, aten.t, aten.unsqueeze, aten.squeeze,
        aten.slice, aten.select, aten.narrow, aten.expand, aten.clone, aten.contiguous, aten.alias, aten.detach,
        aten.detach_, aten.flatten, aten.unflatten, aten.cat, aten.stack, aten.repeat, aten.chunk, aten.split,
        aten.unbind, aten.lift_fresh_copy, aten._assert_tensor_metadata,
    }
)  # fmt: skip
# What makes integers of Python's numbers alone.
_MAKING = frozenset({aten.arange, aten.full, aten.zeros, aten.ones, aten.zeros_like, aten.ones_like, aten.full_like})
# By integers in these places they look up values, which raises in PyTorch where there are none.
_LOOKUPS = {
    aten.index: 1, aten.index_select: 2, aten.gather: 2, aten.take: 1, aten.scatter: 2, aten.index_put: 1,
    aten.index_add: 2, aten.index_copy: 2, aten.scatter_add: 2, aten.embedding_bag: 1, aten.one_hot: 0,
}  # fmt: skip


def integers_of_tables(program: torch.export.ExportedProgram) -> list[tuple[int, int]] | None:
    """Return which inputs are looked up in tables, and of how many rows; None where more is done. O(nodes).

    More is arithmetic with integers, lookups of other kinds by integers of inputs, and casts to integers of anything
    but integers and booleans.
    """
    inputs = [node for node in program.graph.nodes if node.op == "placeholder"]
    given = {spec.arg.name for spec in program.graph_signature.input_specs if spec.kind.name == "USER_INPUT"}
    users = [node for node in inputs if node.name in given]
    # Of each node: the places of the inputs whose integers it moves.
    moved: dict[Node, set[int]] = {node: set() for node in inputs}
    moved.update((node, {place}) for place, node in enumerate(users) if _is_of_integers(node))
    tables: list[tuple[int, int]] = []
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        packet = getattr(node.target, "overloadpacket", None)
        sources = {place for each in node.all_input_nodes for place in moved.get(each, ())}
        if packet is aten.embedding:
            tables += [(place, int(node.args[0].meta["val"].shape[0])) for place in moved.get(node.args[1], ())]
            continue
        if packet in _LOOKUPS and any(moved.get(each) for each in _nodes(node.args[_LOOKUPS[packet] :])):
            return None
        moved[node] = sources if _is_of_integers(node) else set()
        is_cast = packet in (aten.to, aten._to_copy) and not _is_of_floats(node.args[0])
        if _is_of_integers(node) and not (packet in _MOVING or packet in _MAKING or is_cast or packet is None):
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
