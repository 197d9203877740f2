"""Compare what it costs to call a generated module with the model itself and with torch.fx's code.

Run: python benchmarks/call.py [--rounds 9]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch.fx
import torchvision
from compare import describe_machine, medians, print_table
from torch import nn

import featx


def nested_identities(depth: int) -> nn.Module:
    """Build `depth` Identity modules, each one level deeper than the one before."""
    model: nn.Module = nn.Identity()
    for _ in range(depth - 1):
        model = nn.Sequential(nn.Identity(), model)
    return model.eval()


def cut_vit(library_names: dict[str, str]) -> tuple[nn.Module, nn.Module]:
    """Return vit_b_16, and an extractor of it that ends with block 5."""
    model = torchvision.models.vit_b_16(weights=None).eval()
    return model, featx.create_feature_extractor(model, library_names, suppress_diff_warning=True)


def repeat(module: nn.Module, value: torch.Tensor, times: int) -> Callable[[], None]:
    """Return a function that calls `module` so often that the clock is fine enough."""

    def run() -> None:
        with torch.no_grad():
            for _ in range(times):
                module(value)

    return run


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    nested = nested_identities(64)
    image = torch.rand(1, 3, 224, 224)
    resnet = torchvision.models.resnet50(weights=None).eval()
    vit, cut = cut_vit({"encoder.layers.encoder_layer_5": "block 5"})
    cases = [
        ("64 nested Identity", featx.symbolic_trace(nested), nested, torch.ones(1), 200),
        ("the same, torch.fx's code", torch.fx.symbolic_trace(nested), nested, torch.ones(1), 200),
        ("resnet50 at 224 px", featx.symbolic_trace(resnet), resnet, image, 1),
        ("vit_b_16 cut at block 5", cut, vit, image, 1),
    ]
    rows = []
    for name, generated, eager, value, times in cases:
        first, second = medians(repeat(generated, value, times), repeat(eager, value, times), rounds)
        rows.append([name, f"{first / times * 1e3:.3f}", f"{second / times * 1e3:.3f}", f"{first / second:.2f}"])
    print(f"{describe_machine()}; ms a call\n")
    print_table(["case", "generated", "the whole model", "ratio"], rows)


if __name__ == "__main__":
    main()
