"""Compare tracing, name lists and extractors with torch.fx and torchvision on eight models.

Run: python benchmarks/trace.py [--rounds 9] [--models resnet50 vit_b_16 ...]
"""

from __future__ import annotations

import argparse
import statistics
import warnings

import timm
import torch
import torch.fx
import torchvision
from compare import describe_machine, medians, print_table
from torch import nn
from torchvision.models import feature_extraction as peer

import featx

MODELS = (
    "resnet50", "efficientnet_v2_l", "swin_v2_b", "vit_b_16", "densenet201", "convnext_large", "maxvit_t",
    "vit_large_patch16_224",
)  # fmt: skip


def build(name: str) -> nn.Module:
    """Build a model without memory for its weights: a symbolic trace needs none."""
    with torch.device("meta"):
        if name in torchvision.models.list_models():
            return torchvision.models.get_model(name, weights=None)
        return timm.create_model(name, pretrained=False)


def compare_model(name: str, rounds: int) -> tuple[list[str], list[float]]:
    """Return a row of the table, and the three ratios in it."""
    model = build(name).eval()
    names = featx.get_graph_node_names(model, suppress_diff_warning=True)[1]
    wanted = [names[len(names) // 2]]
    pairs = [
        (lambda: featx.Tracer().trace(model), lambda: torch.fx.Tracer().trace(model)),
        (
            lambda: featx.get_graph_node_names(model, suppress_diff_warning=True),
            lambda: peer.get_graph_node_names(model, suppress_diff_warning=True),
        ),
        (
            lambda: featx.create_feature_extractor(model, wanted, suppress_diff_warning=True),
            lambda: peer.create_feature_extractor(model, wanted, suppress_diff_warning=True),
        ),
    ]
    row, ratios = [name, str(len(names))], []
    for ours, theirs in pairs:
        first, second = medians(ours, theirs, rounds)
        ratios.append(first / second)
        row += [f"{first * 1e3:.1f}", f"{second * 1e3:.1f}", f"{first / second:.2f}"]
    return row, ratios


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--models", nargs="+", default=MODELS)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    rows, ratios = [], []
    for name in arguments.models:
        row, found = compare_model(name, arguments.rounds)
        rows.append(row)
        ratios.append(found)
    summary = ["median", ""]
    for column in zip(*ratios, strict=True):
        summary += ["", "", f"{statistics.median(column):.2f}"]
    print(f"{describe_machine()}; ms\n")
    headings = ["model", "nodes", "trace", "torch.fx", "ratio", "names", "torchvision", "ratio", "extractor"]
    print_table([*headings, "torchvision", "ratio"], [*rows, summary])


if __name__ == "__main__":
    main()
