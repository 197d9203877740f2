"""Compare two graphs, or two arguments, for being the same."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from types import FunctionType
from typing import Any

import torch

from featx.ir.arguments import map_arg
from featx.ir.graph import Graph
from featx.ir.node import Node
from featx.rebuilding import contents_of_cell


def first_nodes(graph: Graph, count: int | None) -> list[Node]:
    """Return so many nodes, or all. A list: an iterator that does not come to its end may swallow an interrupt."""
    return list(graph.nodes)[:count]


def is_same_graph(one: Graph, other: Graph, ignoring: Collection[Node] = (), count: int | None = None) -> bool:
    """Say whether two graphs have the same nodes, by opcode, target, name and arguments. O(nodes + edges).

    Tensors that stand in arguments are the same if they are one object or have the same values. What the form of a
    value is checked to be (`node.meta["is_form_check"]`) does not count: that check says itself where it does not hold.
    Nor do the arguments of the nodes in `ignoring`, of either graph. With `count`, only so many nodes are compared, the
    first ones, which both graphs must have.
    """
    return _may_be_same(one, other, count) and next(_differences(one, other, ignoring, count), None) is None


def first_difference(one: Graph, other: Graph) -> tuple[Node, Node] | None:
    """Return the first nodes of two graphs that are not the same, or None. O(nodes + edges).

    All nodes are compared that both have a place for; the output is the last of each.
    """
    found = next(_differences(one, other, ()), None)
    return None if found is None else found[:2]


def nodes_with_other_constants(
    one: Graph, other: Graph, kinds: Collection[type], count: int | None = None
) -> list[Node] | None:
    """Return the nodes of `one` that have other constants than in `other`, or None where the graphs differ otherwise.

    As `is_same_graph`, but that two constants of one of these `kinds` need not be equal.
    """
    if not _may_be_same(one, other, count):
        return None
    found: list[Node] = []
    for node, twin, arguments in _differences(one, other, (), count):
        if arguments is None or not is_same(arguments, (twin.args, twin.kwargs), kinds):
            return None
        found.append(node)
    return found


def _may_be_same(one: Graph, other: Graph, count: int | None) -> bool:
    lengths = len(one.nodes), len(other.nodes)
    return lengths[0] == lengths[1] if count is None else min(lengths) >= count


def _differences(
    one: Graph, other: Graph, ignoring: Collection[Node], count: int | None = None
) -> Iterator[tuple[Node, Node, Any]]:
    """Yield the pairs of nodes that differ, with the arguments of the first in terms of the other graph.

    Where more than the arguments differ, that is None, and it ends.
    """
    twins: dict[Node, Node] = {}
    for node, twin in zip(first_nodes(one, count), first_nodes(other, count), strict=False):
        if node.op != twin.op or node.name != twin.name or not is_same(node.target, twin.target):
            yield node, twin, None
            return
        arguments = map_arg((node.args, node.kwargs), twins.__getitem__)
        is_excepted = node.meta.get("is_form_check") or node in ignoring or twin in ignoring
        if not is_excepted and not is_same(arguments, (twin.args, twin.kwargs)):
            yield node, twin, arguments
        twins[node] = twin


def is_same(one: Any, other: Any, ignoring: Collection[type] = ()) -> bool:
    """Say whether two arguments are the same, as in `is_same_graph`; two of a type in `ignoring` always are."""
    if one is other:
        return True
    if type(one) is not type(other) or isinstance(one, Node):
        return False
    if type(one) in ignoring:
        return True
    if isinstance(one, torch.Tensor):
        return (
            one.shape == other.shape
            and one.dtype == other.dtype
            and one.device == other.device
            and not (one.is_meta or other.is_meta)
            and torch.equal(one, other)
        )
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(
            is_same(item, twin, ignoring) for item, twin in zip(one, other, strict=True)
        )
    if isinstance(one, slice):
        parts = ((one.start, other.start), (one.stop, other.stop), (one.step, other.step))
        return all(is_same(*pair, ignoring) for pair in parts)
    if isinstance(one, dict):
        return list(one) == list(other) and all(is_same(one[key], other[key], ignoring) for key in one)
    if isinstance(one, FunctionType):  # a lambda is made anew in each call of forward
        return one.__code__ is other.__code__ and is_same(_held_by(one), _held_by(other), ignoring)
    if isinstance(one, torch.nn.Module) and isinstance(getattr(one, "code", None), str):
        # What torch.cond makes of its branches in each call: a module of torch.fx, which computes what its code says.
        return one.code == other.code and is_same(list(one.parameters()), list(other.parameters()))
    if isinstance(one, (float, complex)):
        return repr(one) == repr(other)
    answer = one == other
    if getattr(answer, "shape", None) == () and not isinstance(answer, torch.Tensor):  # of two scalars of numpy
        return bool(answer)
    return answer if isinstance(answer, bool) else False  # an array has an answer for each item


def _held_by(function: FunctionType) -> list[Any]:
    held: list[Any] = [function.__defaults__, function.__kwdefaults__]
    return held + [contents_of_cell(cell, None) for cell in function.__closure__ or ()]
