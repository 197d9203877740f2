"""Compare what it costs to call a generated module with the model itself, and what its checks cost.

Run: python benchmarks/call.py [--rounds 9]
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from typing import Any

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


class CutResNet(nn.Module):
    """What a person writes to get C4 out of a resnet: the eager model, cut there."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Run the model as far as `layer3`."""
        m: Any = self.model
        x = m.maxpool(m.relu(m.bn1(m.conv1(x))))
        return {"layer3": m.layer3(m.layer2(m.layer1(x)))}


def without_guards(module: featx.GraphModule) -> featx.GraphModule:
    """Return the same without what is checked at run time."""
    bare = copy.deepcopy(module)
    for node in reversed(bare.graph.nodes):
        if node.meta.get("is_guard"):
            bare.graph.erase_node(node)
    bare.graph.eliminate_dead_code()
    return bare


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
    torch.set_num_threads(1)  # threads that wait for work count as time
    nested = nested_identities(64)
    image = torch.rand(1, 3, 224, 224)
    resnet = torchvision.models.resnet50(weights=None).eval()
    vit, cut = cut_vit({"encoder.layers.encoder_layer_5": "block 5"})
    cut_resnet = featx.create_feature_extractor(resnet, ["layer3"])
    guarded = featx.trace(torchvision.models.swin_v2_t(weights=None).eval(), image)
    cases = [
        ("64 nested Identity", featx.symbolic_trace(nested), nested, torch.ones(1), 200),
        ("the same, torch.fx's code", torch.fx.symbolic_trace(nested), nested, torch.ones(1), 200),
        ("resnet50 at 224 px", featx.symbolic_trace(resnet), resnet, image, 1),
        ("vit_b_16 cut at block 5", cut, vit, image, 1),
        ("resnet50 cut at layer3, root opened; eager cut", cut_resnet, CutResNet(resnet), image, 1),
        ("the same at 32 px", cut_resnet, CutResNet(resnet), torch.rand(1, 3, 32, 32), 4),
        ("swin_v2_t, every node; without its guards", guarded, without_guards(guarded), image, 1),
    ]
    rows = []
    for name, generated, eager, value, times in cases:
        first, second = medians(repeat(generated, value, times), repeat(eager, value, times), rounds)
        rows.append([name, f"{first / times * 1e3:.3f}", f"{second / times * 1e3:.3f}", f"{first / second:.2f}"])
    print(f"{describe_machine()}; ms a call\n")
    print_table(["case", "generated", "compared with", "ratio"], rows)


if __name__ == "__main__":
    main()
