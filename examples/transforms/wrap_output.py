"""Wrap the output of a model: put a function around what it returns, whatever that is made of.

python examples/transforms/wrap_output.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import featx


def wrap_output(gm: featx.GraphModule, function: Callable[..., Any]) -> None:
    """Let `gm` return `function` of each value that it returned; tuples and dicts stay what they are."""
    output = gm.graph.output_node()
    with gm.graph.inserting_before(output):
        output.args = featx.map_arg(output.args, lambda node: gm.graph.call_function(function, (node,)))


def main() -> None:
    gm = featx.trace(nn.Sequential(nn.Linear(4, 3)), torch.randn(2, 4))
    wrap_output(gm, torch.sigmoid)
    print(gm.code)
    print(gm(torch.randn(2, 4)))


if __name__ == "__main__":
    main()
