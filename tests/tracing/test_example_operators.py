"""The example tracer records an operator as the source writes it, as the symbolic tracer does: patterns match both."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import featx


def signs_and_comparisons(x: Tensor) -> tuple[Tensor, ...]:
    kept = torch.where(x > 0, -x, +x)
    return kept, x > 0, ~(x == x), x != 2, x >= 1, x.neg(), torch.neg(x), x.gt(0), torch.gt(x, 0), x.positive()


def arithmetic(x: Tensor) -> tuple[Tensor, ...]:
    return x + 1, x - 2, 2 - x, x * x, x / 3, 3 / x, x**2, 2**x, x // 2, x % 2, x @ x, x & x, x | x, x ^ x, x << 1


def in_place(x: Tensor) -> Tensor:
    y = x * 1
    y += 1
    y *= x
    y -= 2
    y.add_(1)
    return y


def calls(graph: featx.Graph) -> list[tuple[str, Any, str]]:
    # What a function returns that it has written last, each tracer knows by another name.
    nodes = [node for node in graph.nodes if node.op != "output" and not node.meta.get("is_guard")]
    return [(node.op, node.target, f"{node.args} {node.kwargs}") for node in nodes]


def test_operators_are_recorded_as_they_are_written() -> None:
    for function, x in (
        (signs_and_comparisons, torch.ones(3, 3)),
        (arithmetic, torch.ones(3, 3, dtype=torch.long)),
        (in_place, torch.ones(3, 3)),
    ):
        assert calls(featx.trace(function, x).graph) == calls(featx.symbolic_trace(function).graph)
