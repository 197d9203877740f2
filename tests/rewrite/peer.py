"""Rewrite one model with featx and with torch.fx, and compare what comes out."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.fx
from torch import nn
from torch.fx.passes.utils.matcher_utils import SubgraphMatcher as PeerMatcher

import featx

Function = Callable[..., Any]
Model = nn.Module | Function


generator = torch.Generator().manual_seed(7)
x, y, z = [torch.randn(3, 3, generator=generator) for _ in range(3)]


def neg_relu(x: Any) -> Any:
    return torch.neg(torch.relu(x))


def relu(x: Any) -> Any:
    return torch.relu(x)


def negative(x: Any) -> Any:
    return torch.neg(x)


def absolute(x: Any) -> Any:
    return torch.abs(x)


def described(matches: list[Any]) -> list[tuple[str, dict[str, str]]]:
    """Write matches by the names of their nodes."""
    return [(str(match.anchor), {str(key): str(value) for key, value in match.nodes_map.items()}) for match in matches]


def nodes_of(module: Any) -> list[tuple[str, str, str]]:
    """Return opcode, name and arguments of each node."""
    return [(node.op, node.name, str((node.args, node.kwargs))) for node in module.graph.nodes]


def rewritten_alike(model: Model, pattern: Any, replacement: Any, *inputs: Any) -> list[featx.Match]:
    """Replace with both libraries, check that matches, graphs and values are the same, and return featx's matches."""
    ours, peers = featx.symbolic_trace(copy.deepcopy(model)), torch.fx.symbolic_trace(copy.deepcopy(model))
    found = featx.replace_pattern(ours, pattern, replacement)
    expected = torch.fx.replace_pattern(peers, pattern, replacement)
    assert described(found) == described(expected)
    assert nodes_of(ours) == nodes_of(peers)
    values, expected_values = ours(*inputs), peers(*inputs)
    torch.testing.assert_close(values, expected_values, rtol=0, atol=0, equal_nan=True)
    return found


def matched_alike(model: Model, pattern: Model, *options: bool, name: str = "", **named: Any) -> list[dict[str, str]]:
    """Match with both libraries, check that they find the same, and return it by the names of the nodes."""
    ours, our_pattern = featx.symbolic_trace(model), featx.symbolic_trace(pattern)
    peers, peers_pattern = torch.fx.symbolic_trace(model), torch.fx.symbolic_trace(pattern)
    found = featx.SubgraphMatcher(our_pattern.graph, *options, **named).match(ours.graph, name)
    expected = PeerMatcher(peers_pattern.graph, *options, **named).match(peers.graph, name)
    for key in ("nodes_map", "placeholder_nodes", "returning_nodes", "anchors", "name_node_map"):
        assert [str(getattr(match, key)) for match in found] == [str(getattr(match, key)) for match in expected]
    return [{str(key): str(value) for key, value in match.nodes_map.items()} for match in found]


def ones(count: int = 1) -> list[torch.Tensor]:
    return [torch.arange(1.0, 5.0) - 2 * index for index in range(count)]


def count_replaced(
    model: Callable[..., Any], pattern: Callable[..., Any], replacement: Callable[..., Any], inputs: int = 1
) -> int:
    """Replace by an equivalent, check outputs and draws against the eager model, and return the number of matches."""
    module = featx.symbolic_trace(model)
    replaced = len(featx.replace_pattern(module, pattern, replacement))
    torch.manual_seed(3)
    expected = model(*ones(inputs)), torch.rand(1)
    torch.manual_seed(3)
    assert str((module(*ones(inputs)), torch.rand(1))) == str(expected)
    return replaced
