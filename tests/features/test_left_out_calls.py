"""Modules that no requested value is computed from: they are left out, unless what they return may decide something."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn

import featx

IMAGES, TEXTS = torch.rand(2, 3, 8, 8), torch.rand(2, 5)


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Any:
        return self.conv(x).relu().mean((2, 3))


class TwoTowers(nn.Module):
    def __init__(self, tower: nn.Module) -> None:
        super().__init__()
        self.image, self.text, self.other = tower, nn.Linear(5, 4), nn.Linear(5, 4)

    def forward(self, x: Tensor, t: Tensor) -> Any:
        image = self.image(x)
        text = self.other(t) if image is None else self.text(t)
        return image, text


TOWERS: dict[str, Callable[[], nn.Module]] = {
    "layers": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()),
    "torchvision": lambda: torchvision.models.shufflenet_v2_x0_5(weights=None),
    "timm": lambda: timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1),
}


@pytest.mark.parametrize("make", TOWERS.values(), ids=TOWERS)
def test_a_module_of_a_library_that_nothing_needs_is_left_out(make: Callable[[], nn.Module]) -> None:
    model = TwoTowers(make()).eval()
    extractor = featx.create_feature_extractor(model, ["text"], example_inputs=(torch.rand(2, 3, 32, 32), TEXTS))
    assert list(extractor.state_dict()) == ["text.weight", "text.bias"]
    texts = torch.rand(3, 5)
    assert torch.equal(extractor(torch.rand(3, 3, 32, 32), texts)["text"], model.text(texts))


def test_one_of_the_user_may_keep_something_that_others_read_and_runs() -> None:
    extractor = featx.create_feature_extractor(TwoTowers(Tower()), ["text"], example_inputs=(IMAGES, TEXTS))
    assert "image.conv.weight" in extractor.state_dict()


@pytest.mark.slow
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


class AsksForSizes(Tower):
    def forward(self, x: Tensor) -> Any:
        batch, _, height, width = x.shape
        return self.conv(x).reshape(batch, 4, height * width).mean(2)


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


@pytest.fixture(params=["timm.models.some", __name__], ids=["library", "user"])
def place(request: pytest.FixtureRequest) -> str:
    """The Python module in which the class of a tower is said to be defined."""
    return request.param


def defined_at(place: str, kind: type[Tower], monkeypatch: pytest.MonkeyPatch) -> Tower:
    monkeypatch.setattr(kind, "__module__", place)
    monkeypatch.setattr(kind.forward, "__module__", place)
    return kind()


@pytest.mark.parametrize("kind", OTHERS)
def test_a_module_that_may_return_none_is_not(kind: type[Tower], place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = TwoTowers(defined_at(place, kind, monkeypatch)).eval()
    extractor = featx.create_feature_extractor(model, ["text"], example_inputs=(IMAGES, TEXTS))
    assert torch.equal(extractor(IMAGES, TEXTS)["text"], model.text(TEXTS))
    with pytest.raises(featx.SpecializationError):
        extractor(OTHERS[kind], TEXTS)


def test_a_module_that_draws_from_python_is_not(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = TwoTowers(defined_at(place, OfChance, monkeypatch))
    extractor = featx.create_feature_extractor(model, ["text"], example_inputs=(IMAGES, TEXTS))
    assert "image.conv.weight" in extractor.state_dict()


def test_a_module_of_a_library_that_returns_a_tensor_at_all_sizes_is(monkeypatch: pytest.MonkeyPatch) -> None:
    model = TwoTowers(defined_at("timm.models.some", AsksForSizes, monkeypatch)).eval()
    extractor = featx.create_feature_extractor(model, ["text"], example_inputs=(IMAGES, TEXTS))
    assert list(extractor.state_dict()) == ["text.weight", "text.bias"]
    other = torch.rand(3, 3, 9, 7), torch.rand(3, 5)
    assert torch.equal(extractor(*other)["text"], model(*other)[1])


def test_a_module_of_which_the_user_has_set_forward_is_not() -> None:
    tower = nn.Sequential(nn.Conv2d(3, 4, 3))
    tower.forward = functools.partial(tower.forward)  # pyright: ignore[reportAttributeAccessIssue]
    extractor = featx.create_feature_extractor(TwoTowers(tower).eval(), ["text"], example_inputs=(IMAGES, TEXTS))
    assert "image.0.weight" in extractor.state_dict()


def test_a_module_with_a_hook_is_not() -> None:
    tower = nn.Sequential(nn.Conv2d(3, 4, 3))
    tower[0].register_forward_hook(lambda module, args, output: output)
    extractor = featx.create_feature_extractor(TwoTowers(tower).eval(), ["text"], example_inputs=(IMAGES, TEXTS))
    assert "image.0.weight" in extractor.state_dict()


class Prepare(nn.Module):
    """Computes a mask once, for all blocks."""

    def __init__(self, shared: dict[str, Tensor]) -> None:
        super().__init__()
        self.shared = shared

    def forward(self, ids: Tensor) -> None:
        self.shared["mask"] = (ids != 0).float()[..., None]


class Masked(nn.Module):
    def __init__(self, shared: dict[str, Tensor]) -> None:
        super().__init__()
        self.shared, self.fc = shared, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * self.shared["mask"]


class SharesMask(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shared: dict[str, Tensor] = {}
        self.prepare, self.embed, self.block = Prepare(shared), nn.Embedding(9, 4), Masked(shared)

    def forward(self, ids: Tensor) -> Tensor:
        self.prepare(ids)
        return self.block(self.embed(ids))


@pytest.mark.parametrize("name", ["output", "block"])
def test_what_a_module_has_computed_from_small_inputs_for_others_is_no_constant(name: str) -> None:
    model = SharesMask().eval()
    ids = torch.tensor([[1, 2, 3]])
    extractor = featx.create_feature_extractor(model, [name], example_inputs=(ids,))
    for given in (ids, torch.tensor([[4, 0, 0]])):
        assert torch.equal(extractor(given)[name], model(given))


class MovingAverage(nn.Module):
    def __init__(self, student: nn.Module, teacher: nn.Module) -> None:
        super().__init__()
        self.pair = student, teacher  # in a tuple, so that neither is registered again

    def forward(self) -> None:
        with torch.no_grad():
            for one, other in zip(*(module.parameters() for module in self.pair), strict=True):
                other.mul_(0.9).add_(one, alpha=0.1)


class Teacher(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(4, 4), nn.Linear(4, 4)
        self.average = MovingAverage(self.student, self.teacher)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        result = self.student(x), self.teacher(x)
        self.average()
        return result


def test_weights_that_a_module_writes_by_a_reference_are_written_for_the_next_call() -> None:
    model = Teacher()
    x = torch.rand(2, 4)
    extractor = featx.create_feature_extractor(copy.deepcopy(model), ["teacher"], example_inputs=(x,))
    for _ in range(3):
        assert torch.equal(extractor(x)["teacher"], model(x)[1])
