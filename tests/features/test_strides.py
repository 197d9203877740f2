"""Strides of maps: measured by a larger image where the sizes of one image do not tell them."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
import torchvision
from torch import nn

import featx

SIDES = [(160, 120), (97, 131), (63, 63), (224, 224)]


def strides_of(model: nn.Module, nodes: list[str], *sides: int, channels: int = 3) -> list[Any]:
    example = torch.rand(1, channels, *sides)
    infos = featx.create_feature_extractor(model, nodes, example_inputs=example, suppress_diff_warning=True)
    return infos.feature_info.reduction()


@pytest.fixture(scope="module")
def inception() -> nn.Module:
    return torchvision.models.inception_v3(weights=None, aux_logits=False, init_weights=False).eval()


@pytest.mark.slow
@pytest.mark.parametrize("sides", [(128, 96), (75, 75), (224, 160), (299, 299)])
def test_inception_has_its_strides_for_images_of_any_size(sides: tuple[int, int], inception: nn.Module) -> None:
    nodes = ["Conv2d_2b_3x3", "Conv2d_4a_3x3", "Mixed_5d", "Mixed_6e", "Mixed_7c"]
    assert strides_of(inception, nodes, *sides) == [2, 4, 8, 16, 32]


@pytest.mark.slow
def test_a_backbone_of_inception_has_all_maps_of_an_image_that_is_not_square(inception: nn.Module) -> None:
    backbone = featx.create_backbone(inception, strides=(8, 16, 32), example_inputs=torch.rand(1, 3, 128, 96))
    assert backbone.channels == [288, 768, 2048]


@pytest.mark.slow
@pytest.mark.parametrize("sides", SIDES)
def test_strides_of_convolutions_without_padding_are_the_products_of_theirs(sides: tuple[int, int]) -> None:
    alexnet = torchvision.models.alexnet(weights=None).features.eval()  # strides 4, 2, 2, 2
    assert strides_of(alexnet, ["0", "2", "5", "12"], *sides) == [4, 8, 16, 32]
    squeezenet = torchvision.models.squeezenet1_0(weights=None).features.eval()  # strides 2, 2, 2, 2
    assert strides_of(squeezenet, ["0", "2", "6", "11"], *sides) == [2, 4, 8, 16]


@pytest.mark.slow
@pytest.mark.parametrize("sides", [*SIDES, (95, 63)])
def test_layers_that_round_down_have_the_strides_that_timm_declares(sides: tuple[int, int]) -> None:
    model = timm.create_model("vgg11", pretrained=False, num_classes=0).eval()
    declared = [(each["module"], each["reduction"]) for each in model.feature_info]
    assert strides_of(model.features, [name.partition(".")[2] for name, _ in declared], *sides) == [
        stride for _, stride in declared
    ]


def test_functions_that_round_down_have_their_strides() -> None:
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Conv2d(3 if place == 0 else 4, 4, 3, padding=1) for place in range(5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = nn.functional.max_pool2d(layer(x), 2)
            return x

    nodes = ["max_pool2d", "max_pool2d_1", "max_pool2d_2", "max_pool2d_3", "max_pool2d_4"]
    assert strides_of(Halves().eval(), nodes, 95, 70) == [2, 4, 8, 16, 32]


def test_strides_with_odd_factors_are_measured() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 7, 3), nn.Conv2d(4, 4, 5, 3), nn.Conv2d(4, 4, 3, 2)).eval()
    assert strides_of(model, ["0", "1", "2"], 100, 130) == [3, 9, 18]


@pytest.mark.parametrize("scale", [0.75, 1.5])
@pytest.mark.parametrize("side", [nn.Identity(), nn.Conv2d(4, 4, 7, 3)])
def test_scaling_by_a_fraction_leaves_no_whole_stride_whatever_other_layers_do(side: nn.Module, scale: float) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.scaled, self.side = nn.Conv2d(3, 4, 3, 2, 1), nn.Upsample(scale_factor=scale), side

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x = self.conv(x)
            return self.scaled(x), self.side(x)

    assert strides_of(Scaled().eval(), ["conv", "scaled"], 64, 96) == [2, None]  # 2 / 1.5 and 2 / 0.75


def test_a_larger_image_that_fits_several_strides_tells_none() -> None:
    layers = [nn.Conv2d(3, 4, 3, 2, 1), *(nn.Conv2d(4, 4, 3, 2, 1) for _ in range(4)), nn.Upsample(scale_factor=1.5)]
    assert strides_of(nn.Sequential(*layers).eval(), ["4", "5"], 128, 192) == [32, None]  # 256 pixels more: 12 places


def test_volumes_and_signals_are_measured_along_each_axis() -> None:
    volume = nn.Sequential(nn.Conv3d(3, 4, 3, (1, 2, 2)), nn.Conv3d(4, 4, 3, (1, 2, 2)), nn.Conv3d(4, 4, 3, (2, 2, 2)))
    assert strides_of(volume.eval(), ["0", "1", "2"], 16, 60, 45) == [(1, 2, 2), (1, 4, 4), (2, 8, 8)]
    signal = nn.Sequential(nn.Conv1d(1, 4, 10, 5), nn.Conv1d(4, 4, 3, 2), nn.Conv1d(4, 4, 3, 2)).eval()
    assert strides_of(signal, ["0", "1", "2"], 333, channels=1) == [5, 10, 20]


class Spectrum(nn.Module):
    """Has a weight for each of 64 bands, and pools them by another stride than time."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(64)
        self.first = nn.Conv2d(1, 4, 3, (1, 2))
        self.pool = nn.MaxPool2d((2, 3))
        self.last = nn.Conv2d(4, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        return self.last(self.pool(self.first(x)))


def test_a_model_of_a_fixed_height_is_measured_along_its_width() -> None:
    assert strides_of(Spectrum().eval(), ["first", "pool"], 64, 200, channels=1) == [(1, 2), (2, 6)]


class TextLines(nn.Module):
    """Halves the height more often than the width, as networks that read lines of text do."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(1, 4, 3), nn.MaxPool2d(2))
        self.second = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.MaxPool2d((2, 1)))
        self.third = nn.Sequential(nn.Conv2d(4, 4, 3), nn.MaxPool2d((2, 1)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(self.second(self.first(x)))


@pytest.mark.parametrize("sides", [(32, 100), (48, 131)])
def test_a_stride_for_each_axis_is_measured_along_each(sides: tuple[int, int]) -> None:
    assert strides_of(TextLines().eval(), ["first", "second", "third"], *sides, channels=1) == [2, (4, 2), (8, 2)]


def test_a_pooled_map_has_the_whole_image_for_its_place() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, 2), nn.AdaptiveAvgPool2d(1)).eval()
    assert strides_of(model, ["0", "1"], 64, 96) == [2, (64, 96)]


class TwoImages(nn.Module):
    """Takes a small image and a large one, and adds their maps."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.large = nn.Conv2d(3, 4, 3, 2, 1), nn.Conv2d(3, 4, 3, 4, 1)
        self.of_small, self.of_large, self.of_both = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        small, large = self.of_small(self.small(a)), self.of_large(self.large(b))
        return self.of_both(small + large)


class InOneArgument(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = TwoImages()

    def forward(self, images: Any) -> torch.Tensor:
        return self.inner(*(images.values() if isinstance(images, dict) else images))


NODES = ["small", "large", "of_small", "of_large", "of_both"]


def test_a_value_is_measured_against_the_image_from_which_it_is_computed() -> None:
    example = (torch.rand(1, 3, 32, 32), torch.rand(1, 3, 64, 64))
    infos = featx.create_feature_extractor(TwoImages().eval(), NODES, example_inputs=example).feature_info
    assert infos.reduction() == [2, 4, 2, 4, None]
    assert infos["of_both"].layout == "NCHW"
    table = featx.nodes(TwoImages().eval(), example)
    assert [table[name].stride for name in NODES] == [2, 4, 2, 4, None]


@pytest.mark.parametrize("is_dict", [False, True])
def test_images_in_one_argument_are_told_apart(is_dict: bool) -> None:
    pair = [torch.rand(1, 3, 32, 32), torch.rand(1, 3, 64, 64)]
    given = dict(zip("ab", pair, strict=True)) if is_dict else pair
    nodes = [f"inner.{name}" for name in NODES]
    infos = featx.create_feature_extractor(InOneArgument().eval(), nodes, example_inputs=(given,)).feature_info
    assert infos.reduction() == [2, 4, 2, 4, None]


def test_images_of_one_size_are_measured_as_one() -> None:
    example = (torch.rand(1, 3, 32, 32), torch.rand(1, 3, 32, 32))
    model = TwoImages().eval()
    model.large = nn.Conv2d(3, 4, 5, 2, 2)
    infos = featx.create_feature_extractor(model, NODES, example_inputs=example).feature_info
    assert infos.reduction() == [2, 2, 2, 2, 2]


def test_sizes_of_a_second_image_are_measured_by_a_larger_one_too() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.small = nn.Conv2d(3, 4, 3, 2, 1)
            self.large = nn.Sequential(
                nn.Conv2d(3, 4, 11, 4), nn.MaxPool2d(3, 2), nn.MaxPool2d(3, 2), nn.MaxPool2d(3, 2)
            )

        def forward(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.small(a), self.large(b)

    example = (torch.rand(1, 3, 32, 32), torch.rand(1, 3, 160, 120))
    infos = featx.create_feature_extractor(Pair().eval(), ["small", "large"], example_inputs=example).feature_info
    assert infos.reduction() == [2, 32]


class TwoSpeeds(nn.Module):
    """Takes a video at two numbers of frames, as SlowFast does."""

    def __init__(self) -> None:
        super().__init__()
        self.slow, self.fast = nn.Conv3d(3, 8, 3, (1, 2, 2), 1), nn.Conv3d(3, 4, 3, (1, 2, 2), 1)
        self.lateral, self.both = nn.Conv3d(4, 4, (5, 1, 1), (4, 1, 1), (2, 0, 0)), nn.Conv3d(12, 8, 1)

    def forward(self, clips: list[torch.Tensor]) -> torch.Tensor:
        slow, fast = self.slow(clips[0]), self.fast(clips[1])
        return self.both(torch.cat([slow, self.lateral(fast)], 1))


def test_videos_of_two_speeds_have_their_own_strides() -> None:
    clips = [torch.rand(1, 3, 4, 32, 32), torch.rand(1, 3, 16, 32, 32)]
    nodes = ["slow", "fast", "lateral", "both"]
    infos = featx.create_feature_extractor(TwoSpeeds().eval(), nodes, example_inputs=(clips,)).feature_info
    assert infos.reduction() == [(1, 2, 2), (1, 2, 2), (4, 2, 2), None]


def test_an_input_of_one_place_does_not_count_for_maps() -> None:
    class Styled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.last = nn.Conv2d(3, 4, 3, 2, 1), nn.Conv2d(4, 4, 1)

        def forward(self, image: torch.Tensor, style: torch.Tensor) -> torch.Tensor:
            return self.last(self.conv(image) * style)

    example = (torch.rand(1, 3, 32, 32), torch.rand(1, 4, 1, 1))
    infos = featx.create_feature_extractor(Styled().eval(), ["conv", "last"], example_inputs=example).feature_info
    assert infos.reduction() == [2, 2]


def test_a_signal_beside_an_image_does_not_count_for_its_maps() -> None:
    class Conditioned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.text, self.conv = nn.Linear(6, 4), nn.Conv2d(3, 4, 3, 2, 1)
            self.last = nn.Conv2d(4, 4, 1)

        def forward(self, text: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
            return self.last(self.conv(image) + self.text(text).mean(1)[:, :, None, None])

    example = (torch.rand(2, 5, 6), torch.rand(2, 3, 32, 32))
    infos = featx.create_feature_extractor(Conditioned().eval(), ["conv", "last"], example_inputs=example).feature_info
    assert infos.reduction() == [2, 2]
