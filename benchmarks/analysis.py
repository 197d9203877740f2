"""Compare ShapeProp with torch.fx's, and cost with torch's FLOP counter, on models of torchvision.

torch.fx propagates through a copy of the model on the meta device; featx through the model itself.

Run: python benchmarks/analysis.py [--rounds 5]
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable

import torch
import torch.fx
import torchvision
from compare import describe_machine, medians, print_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.passes.shape_prop import ShapeProp
from torch.utils.flop_counter import FlopCounterMode

import featx

Pair = tuple[Callable[[], object], Callable[[], object]]


def pairs(name: str) -> dict[str, Pair]:
    """Return, for each task, what featx does and what its peer does."""
    model = torchvision.models.get_model(name, weights=None).eval()
    value = torch.rand(1, 3, 224, 224)
    on_meta, traced = value.to("meta"), featx.symbolic_trace(model)
    peer, peer_on_meta = (torch.fx.symbolic_trace(each) for each in (model, copy.deepcopy(model).to("meta")))

    def count() -> None:
        with FlopCounterMode(display=False):
            peer_on_meta(on_meta)

    return {
        "ShapeProp, meta": (
            lambda: featx.ShapeProp(traced).propagate(on_meta),
            lambda: ShapeProp(peer_on_meta).propagate(on_meta),
        ),
        "ShapeProp, fake": (
            lambda: featx.ShapeProp(traced, FakeTensorMode()).propagate(value),
            lambda: ShapeProp(peer, FakeTensorMode()).propagate(value),
        ),
        "cost / FlopCounterMode": (lambda: featx.cost(traced, value), count),
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    rows = []
    for name in ("resnet50", "mobilenet_v3_small", "vit_b_16", "swin_t"):
        for task, (ours, theirs) in pairs(name).items():
            with torch.no_grad():
                first, second = medians(ours, theirs, rounds)
            rows.append([name, task, f"{first * 1e3:.1f}", f"{second * 1e3:.1f}", f"{first / second:.2f}"])
    print(f"{describe_machine()}; milliseconds\n")
    print_table(["model", "task", "featx", "peer", "ratio"], rows)


if __name__ == "__main__":
    main()
