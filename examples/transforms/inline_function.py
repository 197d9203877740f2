"""Inline a function: replace a call that is one node by the nodes of what it does.

python examples/transforms/inline_function.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import featx


@featx.wrap
def scaled(x: Any, factor: Any) -> Any:
    """Is one node in a symbolic trace, because it is wrapped."""
    return (x * factor).clamp(max=6.0)


def inline(gm: featx.GraphModule, function: Callable[..., Any]) -> int:
    """Replace each call of `function` by its own operations; return how many there were. O(nodes)."""
    body = featx.symbolic_trace(function).graph
    inputs = [node for node in body.nodes if node.op == "placeholder"]
    calls = gm.graph.find_nodes(op="call_function", target=function)
    for call in calls:
        values = dict(zip(inputs, call.args, strict=True))
        with gm.graph.inserting_before(call):
            result = gm.graph.graph_copy(body, values)
        call.replace_all_uses_with(result)
        gm.graph.erase_node(call)
    return len(calls)


def model(x: torch.Tensor) -> torch.Tensor:
    """Calls the function twice."""
    return scaled(scaled(x, 2.0) + 1, x.shape[0])


def main() -> None:
    gm = featx.symbolic_trace(model)
    print(f"before:\n{gm.code}")
    print(f"{inline(gm, scaled)} calls inlined:\n{gm.code}")


if __name__ == "__main__":
    main()
