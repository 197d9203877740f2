"""Compare tracing, name lists and extractors with torch.fx and torchvision on eight models.

Names and extractors are made with the symbolic tracer and with the one that follows an example.

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

TRACERS = ("symbolic", "example")
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
    names = featx.get_graph_node_names(model, suppress_diff_warning=True, tracer="symbolic")[1]
    shared = set(featx.get_graph_node_names(model, suppress_diff_warning=True, tracer="example")[1])
    common = [name for name in names if name in shared]
    wanted = [common[len(common) // 2]]
    pairs = [
        (lambda: featx.Tracer().trace(model), lambda: torch.fx.Tracer().trace(model)),
        *(
            (
                lambda tracer=tracer: featx.get_graph_node_names(model, suppress_diff_warning=True, tracer=tracer),
                lambda: peer.get_graph_node_names(model, suppress_diff_warning=True),
            )
            for tracer in TRACERS
        ),
        *(
            (
                lambda tracer=tracer: featx.create_feature_extractor(
                    model, wanted, suppress_diff_warning=True, tracer=tracer
                ),
                lambda: peer.create_feature_extractor(model, wanted, suppress_diff_warning=True),
            )
            for tracer in TRACERS
        ),
    ]
    row, ratios = [name, str(len(names))], []
    for ours, theirs in pairs:
        first, second = medians(ours, theirs, rounds)
        ratios.append(first / second)
        row += [f"{first * 1e3:.1f} / {second * 1e3:.1f}", f"{first / second:.2f}"]
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
        summary += ["", f"{statistics.median(column):.2f}"]
    print(f"{describe_machine()}; ms\n")
    headings = ["model", "nodes"]
    for heading in ("trace", "names", "names, example", "extractor", "extractor, example"):
        headings += [heading, "ratio"]
    print_table(headings, [*rows, summary])


if __name__ == "__main__":
    main()
