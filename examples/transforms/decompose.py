"""Decompose operations into simpler ones: run a rule on proxies, which write what it does into a new graph.

python examples/transforms/decompose.py
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import featx

Rules = Mapping[Any, Callable[..., Any]]


def relu(x: Any, inplace: bool = False) -> Any:
    """Do what `F.relu` does, by a comparison and a product."""
    return (x > 0) * x


def layer_norm(x: Any, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Any:
    """Do what `F.layer_norm` does over the last dimension."""
    centered = x - x.mean(-1, keepdim=True)
    normal = centered / torch.sqrt((centered * centered).mean(-1, keepdim=True) + eps)
    normal = normal if weight is None else normal * weight
    return normal if bias is None else normal + bias


RULES: Rules = {F.relu: relu, F.layer_norm: layer_norm}


def decompose(gm: featx.GraphModule, rules: Rules = RULES) -> featx.GraphModule:
    """Return `gm` with each function that has a rule replaced by what the rule does. `gm` stays as it is. O(nodes)."""
    graph = featx.Graph()
    tracer = featx.GraphAppendingTracer(graph)
    copies: dict[featx.Node, featx.Node] = {}
    for node in gm.graph.nodes:
        if node.target in rules:
            # A rule is ordinary code: on proxies, each of its operations becomes a node.
            args, kwargs = featx.map_arg((node.args, node.kwargs), lambda source: featx.Proxy(copies[source], tracer))
            copies[node] = rules[node.target](*args, **kwargs).node
        else:
            copies[node] = graph.node_copy(node, lambda source: copies[source])
    return featx.GraphModule(gm, graph)


class Block(nn.Module):
    """A small block with both operations."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.rand(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(F.relu(self.linear(x)), (8,), self.weight)


def main() -> None:
    model, x = Block(), torch.randn(2, 8)
    decomposed = decompose(featx.symbolic_trace(model))
    print(decomposed.code)
    print(f"largest difference: {(decomposed(x) - model(x)).abs().max():.1e}")


if __name__ == "__main__":
    main()
