"""Modules that no requested value is computed from: they are left out, unless what they return may decide something."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import featx

IMAGES, TEXTS = torch.rand(2, 3, 8, 8), torch.rand(2, 5)


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Any:
        return self.conv(x).relu().mean((2, 3))


class AsksForSizes(Tower):
    def forward(self, x: Tensor) -> Any:
        batch, _, height, width = x.shape
        return self.conv(x).reshape(batch, 4, height * width).mean(2)


class ReturnsDict(Tower):
    def forward(self, x: Tensor) -> Any:
        return {"map": self.conv(x), "all": [x, x + 1]}


class TwoTowers(nn.Module):
    def __init__(self, tower: Tower) -> None:
        super().__init__()
        self.image, self.text, self.other = tower, nn.Linear(5, 4), nn.Linear(5, 4)

    def forward(self, x: Tensor, t: Tensor) -> Any:
        image = self.image(x)
        text = self.other(t) if image is None else self.text(t)
        return image, text


@pytest.mark.parametrize("make", [Tower, AsksForSizes, ReturnsDict])
def test_a_module_that_nothing_needs_is_left_out(make: Callable[[], Tower]) -> None:
    model = TwoTowers(make()).eval()
    extractor = featx.create_feature_extractor(model, ["text"], example_inputs=(IMAGES, TEXTS))
    assert list(extractor.state_dict()) == ["text.weight", "text.bias"]
    texts = torch.rand(3, 5)
    assert torch.equal(extractor(torch.rand(3, 3, 8, 8), texts)["text"], model.text(texts))


def test_the_vision_tower_is_left_out_of_the_text_features_of_clip() -> None:
    transformers = pytest.importorskip("transformers")
    common = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.CLIPConfig(
        text_config={**common, "vocab_size": 99, "bos_token_id": 0, "eos_token_id": 1},
        vision_config={**common, "image_size": 64, "patch_size": 16},
    )
    model = transformers.CLIPModel(config).eval()
    ids, pixels = torch.randint(2, 99, (2, 7)), torch.rand(2, 3, 64, 64)
    for name in ("text_model", "text_model.encoder.layers.1", "text_projection"):
        extractor = featx.create_feature_extractor(
            model, [name], example_inputs={"input_ids": ids, "pixel_values": pixels}
        )
        assert [key for key in extractor.state_dict() if not key.startswith("text_")] == []


class OfValues(Tower):
    def forward(self, x: Tensor) -> Any:
        return None if x.mean() > 10 else self.conv(x)


class OfWidth(Tower):
    def forward(self, x: Tensor) -> Any:
        return None if x.shape[3] > 10 else self.conv(x)


class OfItemCount(Tower):
    def forward(self, x: Tensor) -> Any:
        return None if x.numel() > 500 else self.conv(x)


class OfRank(Tower):
    def forward(self, x: Tensor) -> Any:
        return None if x.dim() == 3 else self.conv(x)


class OfChance(Tower):
    def forward(self, x: Tensor) -> Any:
        return None if random.random() > 2 else self.conv(x)


OTHERS: dict[type[Tower], Tensor] = {
    OfValues: IMAGES + 100,
    OfWidth: torch.rand(2, 3, 8, 16),
    OfItemCount: torch.rand(2, 3, 16, 16),
    OfRank: torch.rand(3, 8, 8),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_a_module_that_may_return_none_is_not(kind: type[Tower]) -> None:
    model = TwoTowers(kind()).eval()
    extractor = featx.create_feature_extractor(model, ["text"], example_inputs=(IMAGES, TEXTS))
    assert torch.equal(extractor(IMAGES, TEXTS)["text"], model.text(TEXTS))
    with pytest.raises(featx.SpecializationError):
        extractor(OTHERS[kind], TEXTS)


def test_a_module_that_draws_from_python_is_not() -> None:
    extractor = featx.create_feature_extractor(TwoTowers(OfChance()), ["text"], example_inputs=(IMAGES, TEXTS))
    assert "image.conv.weight" in extractor.state_dict()


def test_a_module_with_a_hook_is_not() -> None:
    model = TwoTowers(Tower()).eval()
    model.image.conv.register_forward_hook(lambda module, args, output: output)
    extractor = featx.create_feature_extractor(model, ["text"], example_inputs=(IMAGES, TEXTS))
    assert "image.conv.weight" in extractor.state_dict()
