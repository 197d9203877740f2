"""Memory on a GPU: of building an extractor, and of its calls."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
import torchvision
from torch import nn

import featx


def peak_of(call: Any) -> tuple[int, int]:
    """The bytes that tensors take at most during a call, and those that they take after it, beside those before it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call()
    torch.cuda.synchronize()
    found = torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before
    del result
    return found


@pytest.mark.parametrize("entry", ["names", "extractor", "trace", "symbolic"])
def test_building_takes_no_memory(entry: str) -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(2048, 2048), nn.ReLU()) for _ in range(16)]).to("cuda")
    x = torch.rand(4, 2048, device="cuda")
    calls = {
        "names": lambda: featx.get_graph_node_names(model, example_inputs=x),
        "extractor": lambda: featx.create_feature_extractor(model, ["7", "15"], example_inputs=x),
        "trace": lambda: featx.trace(model, example_inputs=x),
        "symbolic": lambda: featx.symbolic_trace(model),
    }
    peak, left = peak_of(calls[entry])
    assert peak < 1e6
    assert left < 1e6


@pytest.mark.parametrize("name", ["resnet50", "convnext", "vit"])
def test_a_call_takes_what_the_model_cut_by_hand_takes(name: str) -> None:
    if name == "vit":
        model: Any = timm.create_model("vit_tiny_patch16_224").eval().to("cuda")
        node, cut = "blocks.5", lambda x: model.blocks[:6](model.norm_pre(model.patch_drop(
            model._pos_embed(model.patch_embed(x)))))  # fmt: skip
    elif name == "convnext":
        model = torchvision.models.convnext_tiny(weights=None).features.eval().to("cuda")
        node, cut = "5", lambda x: model[:6](x)
    else:
        model = torchvision.models.resnet50(weights=None).eval().to("cuda")
        node, cut = "layer3", lambda x: nn.Sequential(*list(model.children())[:7])(x)
    x = torch.rand(8, 3, 224, 224, device="cuda")
    extractor = featx.create_feature_extractor(model, [node], example_inputs=x).eval()
    with torch.no_grad():
        for call in (cut, extractor):
            call(x)  # work space of libraries
        peak, _ = peak_of(lambda: extractor(x))
        by_hand, _ = peak_of(lambda: cut(x))
    assert peak <= by_hand
