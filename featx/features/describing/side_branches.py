"""Which maps lie on side branches: they go into the attention of a larger map, and nowhere else."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping

import torch
from torch import nn
from torch.nn import functional

from featx.features.describing.maps import Stage
from featx.features.describing.node_rows import TracedRows
from featx.ir.form import sources_of_values
from featx.ir.node import Node
from featx.tracing.nodes.module_output import module_output, node_that_made

_PRODUCTS = (
    torch.matmul, torch.bmm, torch.baddbmm, torch.einsum, operator.matmul, functional.scaled_dot_product_attention,
    functional.multi_head_attention_forward,
)  # fmt: skip
_PRODUCT_METHODS = frozenset({"matmul", "bmm", "baddbmm", "__matmul__"})


def without_side_branches(
    maps: dict[str, list[Stage]], traced: TracedRows, modules: Mapping[str, nn.Module]
) -> dict[str, list[Stage]]:
    """Leave out maps of which all that follows becomes, by a product of two values, part of a map of smaller stride.

    Keys and values of attention may be made at a larger stride than the queries have, as in CvT, PVT and SegFormer.
    The network does not go on with these as maps. Maps that are scaled up, as in a U-Net, are not left out.
    O(nodes * strides).
    """
    if not any(_is_product(node, modules) for node in traced.graph.nodes):
        return maps
    kept = _strides_that_go_on(traced, modules)
    return {
        name: stages
        for name, stages in maps.items()
        if any(stage.stride in kept[node_that_made(traced.nodes[stage.name])] for stage in stages)
    }


def _is_product(node: Node, modules: Mapping[str, nn.Module]) -> bool:
    """Say whether a node may be the product of an attention: one of two values, which weights are not."""
    if node.op == "call_module":
        is_product = isinstance(modules.get(node.target), nn.MultiheadAttention)
    elif node.op == "call_method":
        is_product = node.target in _PRODUCT_METHODS
    else:
        is_product = node.op == "call_function" and node.target in _PRODUCTS
    return is_product and sum(source.op != "get_attr" for source in sources_of_values(node)) > 1


def _strides_that_go_on(traced: TracedRows, modules: Mapping[str, nn.Module]) -> dict[Node, set[int]]:
    """Return for each node of which strides it may be a map that the network goes on with.

    A way that leads on from a map ends well at the output, at a value that nothing reads, or where the map is scaled
    up. It ends badly at a map of smaller stride if it has passed a product since the last map of its own stride or of
    a larger one.
    """
    strides = {traced.nodes[row.name]: row.stride for row in traced.rows if isinstance(row.stride, int)}
    every = set(strides.values())
    # What goes on from a node, by whether the way to it has passed a product.
    ways: dict[Node, tuple[set[int], set[int]]] = {}
    behind: dict[Node, set[int]] = {}
    for node in reversed(traced.graph.nodes):
        users = [user for user in node.users if _is_use(user) and node in sources_of_values(user)]
        is_end = not users
        plain, multiplied = (every if is_end else _together(ways[user][way] for user in users) for way in (0, 1))
        behind[node] = plain
        stride = strides.get(node)
        if stride is not None and not is_end:
            same = {each for each in plain if each <= stride}
            plain, multiplied = same | {each for each in every if each > stride}, same
        ways[node] = (multiplied, multiplied) if _is_product(node, modules) else (plain, multiplied)
    return behind


def _is_use(user: Node) -> bool:
    """Say whether a node that reads another one is more than a check, or the mark of what a module returns."""
    return not user.meta.get("is_guard") and (user.target is not module_output or bool(user.users))


def _together(sets: Iterable[set[int]]) -> set[int]:
    return {each for found in sets for each in found}
