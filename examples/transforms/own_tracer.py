"""Subclass Tracer: choose which modules are one node, and note in each node which block of the model it belongs to.

python examples/transforms/own_tracer.py
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import nn

import featx


class BlockTracer(featx.Tracer):
    """Keeps modules of given classes whole, and writes the path of the module that runs into `node.meta["block"]`."""

    def __init__(self, blocks: tuple[type[nn.Module], ...]) -> None:
        super().__init__()
        self._blocks = blocks
        self._path = ""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, self._blocks) or super().is_leaf_module(m, module_qualified_name)

    def call_module(self, m: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        outer, self._path = self._path, self.path_of_module(m)
        try:
            return super().call_module(m, forward, args, kwargs)
        finally:
            self._path = outer

    def create_node(self, *args: Any, **kwargs: Any) -> featx.Node:
        node = super().create_node(*args, **kwargs)
        node.meta["block"] = self._path
        return node


class Residual(nn.Module):
    """A block that is to be one node."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, width), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x)


def main() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Sequential(Residual(8), Residual(8)), nn.Linear(8, 2))
    for tracer in (featx.Tracer(), BlockTracer((Residual,))):
        graph = tracer.trace(model)
        gm = featx.GraphModule(model, graph)
        print(f"{type(tracer).__name__}: {len(graph.nodes)} nodes\n{gm.code}")
    blocks = Counter(node.meta["block"] for node in BlockTracer(()).trace(model).nodes)
    print(f"nodes by the module that makes them: {dict(blocks)}")


if __name__ == "__main__":
    main()
