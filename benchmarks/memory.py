"""Measure the memory that building an extractor takes, and that its calls take at most beside a model cut by hand.

python benchmarks/memory.py [--gigabytes 2]

Building is measured in a process of its own, by the most memory that was resident. Calls are measured by the tensors
that are alive after each operator.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torchvision
from compare import print_table
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import featx

_LAYERS = 16


class LiveTensors(TorchDispatchMode):
    """Adds up the memory of tensors that operators have made since it was entered, and that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and note its results."""
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage()._cdata not in given | self._known:
                storage = leaf.untyped_storage()
                self._known.add(storage._cdata)
                self.alive += storage.nbytes()
                weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.alive)
        return result

    def _free(self, memory: int, size: int) -> None:
        self._known.discard(memory)
        self.alive -= size


def peak_of(call: Callable[[], object]) -> float:
    """Return the most memory, in MB, that the tensors of a call took at once."""
    with torch.no_grad(), LiveTensors() as live:
        result = call()
    del result
    return live.peak / 1e6


def cases() -> dict[str, tuple[nn.Module, list[str], int]]:
    """Return models whose extractor needs their first layers, and how many of their children these are."""
    resnet, convnext = torchvision.models.resnet50(weights=None), torchvision.models.convnext_tiny(weights=None)
    vgg = torchvision.models.vgg16(weights=None)
    return {
        "resnet50, layer3": (resnet.eval(), ["layer3"], 7),
        "convnext_tiny, features.5": (convnext.features.eval(), ["5"], 6),
        "vgg16, features.20": (vgg.features.eval(), ["20"], 21),
    }


def build(gigabytes: float) -> str:
    """Return how much was resident at most before the building of an extractor, and after it, in MB."""
    width = int((gigabytes * 1e9 / 4 / _LAYERS) ** 0.5)
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(_LAYERS)])
    model = model.to_empty(device="cpu").eval()
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.01)
    featx.create_feature_extractor(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), ["1"], example_inputs=torch.rand(1, 2))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    extractor = featx.create_feature_extractor(
        model, [f"{_LAYERS - 2}.0", f"{_LAYERS - 1}"], example_inputs=torch.rand(1, width)
    )
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    size = sum(parameter.nbytes for parameter in extractor.parameters())
    return f"{size / 1e6:.0f} {before / 1e3:.0f} {after / 1e3:.0f}"


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2)
    parser.add_argument("--build", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.build:
        print(build(arguments.gigabytes))
        return
    rows: list[list[str]] = []
    x = torch.rand(4, 3, 224, 224)
    for name, (model, nodes, count) in cases().items():
        extractor = featx.create_feature_extractor(model, nodes, example_inputs=x)
        cut = nn.Sequential(*list(model.children())[:count])
        ours, theirs = peak_of(lambda extractor=extractor: extractor(x)), peak_of(lambda cut=cut: cut(x))
        rows.append([name, f"{ours:.1f}", f"{theirs:.1f}", f"{ours / theirs:.3f}"])
    print("the most memory of tensors in a call, MB\n")
    print_table(["model, node", "extractor", "cut by hand", "ratio"], rows)
    command = [sys.executable, __file__, "--build", "--gigabytes", str(arguments.gigabytes)]
    found = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    print("\nthe most memory that was resident, MB\n")
    print_table(["weights", "before building", "after it", "more"], [[*found, f"{int(found[2]) - int(found[1])}"]])


if __name__ == "__main__":
    main()
