"""Interpreter and Transformer on real models: the values of the model itself, in both modes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import featx
from featx.tree import tree_leaves

torchvision = pytest.importorskip("torchvision")

pytestmark = pytest.mark.sweep

# Among them: in-place activations, chunk, cat of lists, squeeze-and-excitation, windows, guards, literals.
NAMES = ["resnet18", "mobilenet_v3_small", "shufflenet_v2_x0_5", "small swin_v2"]


class Writes(nn.Module):
    """Writes in place in every way, to its input's copy, to a buffer, and to a part of a value."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor, flag: torch.Tensor | None = None):
        y = x.clone()
        y[:, 0] = 1.0
        y += 1
        y.view(-1).mul_(-1)
        self.count.add_(1)
        z = self.act(y)
        parts = [z, y * self.count]
        parts.append(torch.ones_like(x))
        return {"sum": sum(parts), "parts": tuple(parts), "noise": torch.rand(2) + x.sum()}


def build(name: str) -> tuple[nn.Module, torch.Tensor]:
    if name == "writes":
        return Writes(), torch.rand(2, 3)
    if name == "small swin_v2":
        parts = torchvision.models.swin_transformer
        model = parts.SwinTransformer(
            [4, 4], 8, [1, 2], [1, 2], [4, 4], block=parts.SwinTransformerBlockV2, downsample_layer=parts.PatchMergingV2
        )
        return model, torch.rand(2, 3, 32, 32)
    return torchvision.models.get_model(name, weights=None), torch.rand(2, 3, 32, 32)


def outcome(model: nn.Module, run: Callable[..., Any], value: torch.Tensor) -> list[Any]:
    """Return what `run` gives and the state that it leaves `model` in, which is put back."""
    state = copy.deepcopy(model.state_dict())
    torch.manual_seed(0)
    with torch.no_grad():
        result = run(value.clone())
    after = [tensor.clone() for tensor in model.state_dict().values()]
    model.load_state_dict(state)
    return [*tree_leaves(result), *after]


def assert_same(one: list[Any], other: list[Any]) -> None:
    assert len(one) == len(other)
    assert all(torch.equal(left, right) for left, right in zip(one, other, strict=True))


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", ["writes", *NAMES])
def test_values_and_state_are_those_of_the_model(name: str, training: bool) -> None:
    model, value = build(name)
    model.train(training)
    expected = outcome(model, model, value)
    module = featx.trace(model, value) if training else featx.symbolic_trace(model)
    assert_same(outcome(model, featx.Interpreter(module).run, value), expected)
    assert_same(outcome(model, featx.Interpreter(module, garbage_collect_values=False).run, value), expected)
    transformed = featx.Transformer(module).transform()
    transformed.graph.lint()
    assert transformed.code == module.code
    assert_same(outcome(model, transformed, value), expected)


def test_extractor_is_interpreted_and_transformed_in_its_present_mode() -> None:
    model, value = build("resnet18")
    extractor = featx.create_feature_extractor(model, {"layer1": "low", "layer2.1.relu": "middle"})
    for training in (True, False, True):
        extractor.train(training)
        expected = outcome(model, extractor, value)
        assert_same(outcome(model, featx.Interpreter(extractor).run, value), expected)
        assert_same(outcome(model, featx.Transformer(extractor).transform(), value), expected)
