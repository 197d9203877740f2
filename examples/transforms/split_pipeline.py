"""Split a model into stages for a pipeline, balanced by what they cost, and run batches through them in turn.

python examples/transforms/split_pipeline.py
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import featx
from featx.passes import split_at


def balanced_cuts(gm: featx.GraphModule, example: Tensor, stages: int) -> list[featx.Node]:
    """Return the nodes after which `gm` is cut, so that each of `stages` stages has about as many FLOPs.

    A cut stands where one value alone goes on: that is all that one device has to send to the next.
    """
    flops = {found.name: found.flops for found in featx.cost(gm, example).nodes}
    total = sum(flops.values())
    cuts: list[featx.Node] = []
    done, alive = 0, dict[featx.Node, None]()
    left = {node: len(node.users) for node in gm.graph.nodes}
    for node in gm.graph.nodes:
        for source in node.all_input_nodes:
            left[source] -= 1
            if not left[source]:
                alive.pop(source, None)
        if node.users:
            alive[node] = None
        done += flops.get(node.name, 0)
        if len(cuts) < stages - 1 and done >= total * (len(cuts) + 1) / stages and list(alive) == [node]:
            cuts.append(node)
    return cuts


def run_pipeline(stages: list[nn.Module], batches: Iterable[Tensor]) -> Iterator[Any]:
    """Yield the result of each batch; in each step, every stage works on another one. Here all are on one device."""
    waiting = iter(batches)
    inside: list[Any] = [None] * len(stages)
    while True:
        inside = [next(waiting, None), *inside[:-1]]
        if all(value is None for value in inside):
            return
        # On several devices these run at the same time.
        inside = [None if value is None else stage(value) for stage, value in zip(stages, inside, strict=True)]
        if inside[-1] is not None:
            yield inside[-1]


def main() -> None:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())]
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *layers).eval()
    images = torch.randn(2, 3, 32, 32)
    gm = featx.trace(model, images)
    cuts = balanced_cuts(gm, images, 3)
    pipeline = split_at(gm, cuts)
    print(f"cut after {[node.meta['qualified_name'] for node in cuts]}:\n{pipeline.code}")
    batches = [torch.randn(2, 3, 32, 32) for _ in range(4)]
    results = list(run_pipeline(list(pipeline.children()), batches))
    print("equal:", all(torch.equal(result, model(batch)) for result, batch in zip(results, batches, strict=True)))


if __name__ == "__main__":
    main()
