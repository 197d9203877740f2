"""Tokens of patches that are no square tiles, and sequences that image models make of their maps."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn

import featx
from featx import Feature


class Patches(nn.Module):
    """Two blocks over prefix tokens and patches that a convolution embeds."""

    def __init__(self, embed: nn.Module, prefixes: Sequence[str] = ("cls_token",), count: int = 1) -> None:
        super().__init__()
        self.embed = embed
        self.names = list(prefixes)
        for name in prefixes:
            self.register_parameter(name, nn.Parameter(torch.randn(1, count, 8)))
        self.blocks = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.embed(x).flatten(2).transpose(1, 2)
        prefixes = [getattr(self, name).expand(len(x), -1, -1) for name in self.names]
        return self.blocks(torch.cat([*prefixes, tokens], 1))


# The model, the shape of its input, and what is true of its tokens: their stride, and how many are no patches.
CASES = {
    "upright": (lambda: Patches(nn.Conv2d(3, 8, (16, 8), (16, 8))), (2, 3, 64, 64), (16, 8), 1),
    "as many as square ones": (lambda: Patches(nn.Conv2d(3, 8, (16, 4), (16, 4))), (2, 3, 64, 64), (16, 4), 1),
    "overlapping": (lambda: Patches(nn.Conv2d(3, 8, 16, 10)), (2, 3, 64, 96), 10, 1),
    "video": (lambda: Patches(nn.Conv3d(3, 8, (2, 16, 16), (2, 16, 16))), (2, 3, 4, 64, 64), (2, 16, 16), 1),
    "of no known name": (lambda: Patches(nn.Conv2d(3, 8, 7, 5), ("extra",), 3), (2, 3, 40, 40), 5, 3),
    "more queries than patches": (lambda: Patches(nn.Conv2d(3, 8, 8, 8), ("prompt",), 40), (2, 3, 32, 32), 8, 40),
    "of small convolutions": (
        lambda: Patches(nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.Conv2d(8, 8, 3, 2))), (2, 3, 37, 29), None, 1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_tokens_before_patches_do_not_count(case: str) -> None:
    build, shape, stride, prefix = CASES[case]
    model, x = build().eval(), torch.rand(shape)
    request = {"blocks.0": [Feature("all"), Feature("avg", pool="avg"), Feature("cls", pool="cls")]}
    extractor = featx.create_feature_extractor(model, request, example_inputs=x)
    info = extractor.feature_info["all"]
    assert (info.layout, info.stride, info.prefix_tokens, info.has_class_token) == ("NLC", stride, prefix, True)
    found = extractor(x)
    torch.testing.assert_close(found["avg"], found["all"][:, prefix:].mean(1))
    assert torch.equal(found["cls"], found["all"][:, 0])


def test_register_tokens_alone_are_no_class_token() -> None:
    model = Patches(nn.Conv2d(3, 8, 8, 8), ("reg_tokens",), 4).eval()
    x = torch.rand(2, 3, 32, 32)
    info = featx.create_feature_extractor(model, ["blocks.0"], example_inputs=x).feature_info[0]
    assert (info.prefix_tokens, info.has_class_token) == (4, False)
    with pytest.raises(featx.RequestError, match="has no class token"):
        featx.create_feature_extractor(model, {"blocks.0": Feature(pool="cls")}, example_inputs=x)


def test_patches_that_are_no_squares_become_a_map() -> None:
    model = Patches(nn.Conv2d(3, 8, (16, 8), (16, 8))).eval()
    request = {"blocks.0": [Feature("tokens", prefix_tokens="drop"), Feature("map", layout="NCHW")]}
    extractor = featx.create_feature_extractor(model, request, example_inputs=torch.rand(2, 3, 64, 64))
    found = extractor(torch.rand(3, 3, 32, 48))
    assert found["map"].shape == (3, 8, 2, 6)
    assert torch.equal(found["map"].flatten(2).transpose(1, 2), found["tokens"])


def test_patches_that_overlap_become_no_map() -> None:
    model = Patches(nn.Conv2d(3, 8, 16, 10)).eval()
    with pytest.raises(featx.RequestError, match="do not lie side by side"):
        featx.create_feature_extractor(
            model, {"blocks.0": Feature(layout="NCHW")}, example_inputs=torch.rand(2, 3, 64, 96)
        )


class Pads(Patches):
    """Pads an image to whole patches."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        height, width = x.shape[2:]
        return super().forward(nn.functional.pad(x, (0, -width % 8, 0, -height % 8)))


def test_tokens_of_a_padded_image_are_told_from_those_of_its_size() -> None:
    model = Pads(nn.Conv2d(3, 8, 8, 8)).eval()
    request = {"blocks.0": Feature("map", layout="NCHW")}
    extractor = featx.create_feature_extractor(model, request, example_inputs=torch.rand(2, 3, 32, 32), adaptive=True)
    assert extractor(torch.rand(2, 3, 16, 40))["map"].shape == (2, 8, 2, 5)
    with pytest.raises(featx.RequestError, match="are no map of 2 by 5 places"):
        extractor(torch.rand(2, 3, 16, 42))


class Scales(Patches):
    """Brings an image to one size."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(nn.functional.interpolate(x, size=(32, 32)))


def test_tokens_of_a_scaled_image_are_no_map() -> None:
    model = Scales(nn.Conv2d(3, 8, 8, 8)).eval()
    with pytest.raises(featx.RequestError, match="17 tokens for a wider image too"):
        featx.create_feature_extractor(
            model, {"blocks.0": Feature(layout="NCHW")}, example_inputs=torch.rand(2, 3, 32, 32)
        )


class Lines(nn.Module):
    """A recurrent layer reads the columns of a map."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 24, 3, (4, 2), 1)
        self.pool = nn.AdaptiveAvgPool2d((1, None))
        self.rnn = nn.GRU(24, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        columns = self.pool(self.conv(x)).squeeze(2)
        return self.rnn(columns.permute(2, 0, 1))[0]


@pytest.mark.parametrize("samples", [2, 5])
def test_columns_of_a_map_are_told_by_a_wider_image(samples: int) -> None:
    x = torch.rand(samples, 1, 32, 100)
    request = {
        "squeeze": [Feature("columns"), Feature("avg", pool="avg")],
        "permute": [Feature("turned"), Feature("turned_avg", pool="avg")],
    }
    extractor = featx.create_feature_extractor(Lines().eval(), request, example_inputs=x)
    layouts = {info.key: info.layout for info in extractor.feature_info}
    assert layouts == {"columns": "NCL", "avg": "NC", "turned": "LNC", "turned_avg": "NC"}
    found = extractor(x)
    torch.testing.assert_close(found["avg"], found["columns"].mean(2))
    torch.testing.assert_close(found["turned_avg"], found["columns"].mean(2))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_generalized_means_are_computed_in_single_precision_at_least(dtype: torch.dtype) -> None:
    values = torch.full((1, 2, 4, 4), 100.0, dtype=dtype)
    model = nn.Sequential(nn.Identity())
    extractor = featx.create_feature_extractor(
        model, {"0": Feature("gem", pool="gem")}, example_inputs=torch.rand(1, 2, 4, 4)
    )
    found = extractor(values)["gem"]
    assert found.dtype == dtype
    torch.testing.assert_close(found, torch.full((1, 2), 100.0, dtype=dtype))
