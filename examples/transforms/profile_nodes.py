"""Write a profiling Interpreter: measure what each node of a model takes, and sort.

    python examples/transforms/profile_nodes.py

`featx.passes.profile` does this with warm-up, medians and a roofline.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from typing import Any

import torch
from torch import nn

import featx


class ProfilingInterpreter(featx.Interpreter):
    """Runs a graph and keeps, for each node, the seconds that each of its runs took in `seconds`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.seconds: defaultdict[featx.Node, list[float]] = defaultdict(list)

    def run_node(self, n: featx.Node) -> Any:
        start = time.perf_counter()
        value = super().run_node(n)
        self.seconds[n].append(time.perf_counter() - start)
        return value

    def table(self, rows: int = 8) -> str:
        """Return the slowest nodes, by the median of their runs."""
        medians = {node: statistics.median(seconds) for node, seconds in self.seconds.items()}
        total = sum(medians.values())
        slowest = sorted(medians, key=medians.__getitem__, reverse=True)[:rows]
        lines = [f"{medians[node] * 1e3:8.3f} ms {medians[node] / total:5.1%}  {node.op:14} {node}" for node in slowest]
        return "\n".join(lines)


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.Flatten())
    image = torch.randn(4, 3, 64, 64)
    interpreter = ProfilingInterpreter(featx.trace(model, image))
    for _ in range(5):
        interpreter.run(image)
    print(interpreter.table())


if __name__ == "__main__":
    main()
