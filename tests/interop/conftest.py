"""What the tests of the conversions share: comparing graphs node by node."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx

import featx

Compare = Callable[[Any, Any], None]


def is_same(one: Any, other: Any, twins: dict[Any, Any]) -> bool:
    """Say whether two arguments are the same, for graphs in which `twins` are the same nodes."""
    if isinstance(one, (featx.Node, torch.fx.Node)):
        return twins.get(one) is other
    if isinstance(one, (list, dict)) and isinstance(other, type(one).__mro__[-2]):  # each has its immutable ones
        pairs = list(one.items()) if isinstance(one, dict) else one
        return is_same(tuple(pairs), tuple(other.items()) if isinstance(other, dict) else tuple(other), twins)
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one is other
    if isinstance(one, tuple):
        return len(one) == len(other) and all(is_same(*pair, twins) for pair in zip(one, other, strict=True))
    if isinstance(one, slice):
        parts = operator.attrgetter("start", "stop", "step")
        return is_same(parts(one), parts(other), twins)
    return bool(one is other or one == other)


def is_helper(node: Any) -> bool:
    return "featx_helper" in node.meta


@pytest.fixture
def assert_same() -> Compare:
    """A function that asserts that two graphs have the same nodes, in everything that a node has."""

    def compare(one: Any, other: Any) -> None:
        twins: dict[Any, Any] = {}
        nodes = [node for node in other.nodes if not is_helper(node)]
        assert [node.name for node in one.nodes] == [node.name for node in nodes]
        for node, twin in zip(one.nodes, nodes, strict=True):
            assert (node.op, node.type) == (twin.op, twin.type), node
            assert node.target is twin.target or node.target == twin.target, node
            meta = {key: value for key, value in twin.meta.items() if value != "by featx"}
            assert list(node.meta) == list(meta), node
            for key, value in node.meta.items():
                assert value is meta[key] or is_same(value, meta[key], twins), (node, key)
            if not any(is_helper(source) for source in twin.all_input_nodes):
                assert is_same(node.args, twin.args, twins), (node, node.args, twin.args)
                assert is_same(node.kwargs, twin.kwargs, twins), node
            twins[node] = twin

    return compare
