"""Invert a function: walk its graph backwards, and undo one operation after the other.

python examples/transforms/invert.py
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

import featx

# For y = f(x, *constants): x = inverse(y, *constants).
INVERSES: dict[Any, Callable[..., Any]] = {
    operator.add: operator.sub,
    operator.sub: operator.add,
    operator.mul: operator.truediv,
    operator.truediv: operator.mul,
    torch.exp: torch.log,
    torch.log: torch.exp,
    torch.sinh: torch.asinh,
    torch.tanh: torch.atanh,
    torch.sigmoid: torch.logit,
    torch.neg: torch.neg,
}


def invert(gm: featx.GraphModule) -> featx.GraphModule:
    """Return the inverse of a chain of invertible functions of one input.

    Raises:
        ValueError: a node has no inverse here, or is not the only reader of its input; the message names it.
    """
    graph = featx.Graph()
    value: Any = graph.placeholder("y")
    for node in reversed(gm.graph.nodes):
        if node.op in ("output", "placeholder"):
            continue
        source, *constants = node.args
        if not isinstance(source, featx.Node) or len(source.users) > 1 or featx.Node in map(type, constants):
            raise ValueError(f"'{node.name}' does not take the value before it, alone and first")
        if node.target not in INVERSES:
            raise ValueError(f"'{node.name}' has no inverse here ({node.target})")
        value = graph.call_function(INVERSES[node.target], (value, *constants))
    graph.output(value)
    return featx.GraphModule(gm, graph)


def squash(x: torch.Tensor) -> torch.Tensor:
    """A function to invert."""
    return torch.tanh(torch.neg(x) * 2 + 0.5) / 3


def main() -> None:
    inverse = invert(featx.symbolic_trace(squash))
    print(inverse.code)
    x = torch.linspace(-1, 1, 5)
    print(f"x:                   {x.tolist()}\ninverse(squash(x)): {inverse(squash(x)).tolist()}")


if __name__ == "__main__":
    main()
