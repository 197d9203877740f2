"""Replace an operation wherever a model spells it: as a function, a method or a module.

python examples/transforms/replace_op.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import featx


def is_relu(gm: featx.GraphModule, node: featx.Node) -> bool:
    """Say whether a node applies a relu, however it is written."""
    if node.op == "call_module":
        return isinstance(gm.get_submodule(node.target), nn.ReLU)
    return node.target in (F.relu, torch.relu, "relu")


def replace_relu(gm: featx.GraphModule) -> int:
    """Let `gm` apply a GELU wherever it applies a relu, and return how many there were. O(nodes)."""
    found = [node for node in gm.graph.nodes if is_relu(gm, node)]
    for node in found:
        with gm.graph.inserting_after(node):
            gelu = gm.graph.call_function(F.gelu, (node.args[0],))
        node.replace_all_uses_with(gelu)
        gm.graph.erase_node(node)
    gm.delete_all_unused_submodules()
    return len(found)


class Spellings(nn.Module):
    """Applies a relu in three ways."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.relu = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.relu(self.linear(F.relu(x)).relu())


def main() -> None:
    gm = featx.trace(Spellings(), torch.randn(2, 8))
    print(f"{replace_relu(gm)} relus replaced:\n{gm.code}")


if __name__ == "__main__":
    main()
