"""Numbers beside the tensors of an object that a module returns, such as the sizes in torchvision's ImageList."""

from __future__ import annotations

import copy
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn

import featx


@dataclass
class Batch:
    tensors: Tensor
    sizes: list[tuple[int, int]]
    scale: float
    name: str = "photos"


class Prepare(nn.Module):
    """Halves an image and returns its size; a module that a request for `layer` keeps whole."""

    def forward(self, x: Tensor) -> Batch:
        height, width = x.shape[-2:]
        return Batch(x[..., ::2, ::2] * 1.5, [(height, width)], width / 8)


class UsesNothing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.prepare = Prepare()
        self.layer = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> Any:
        return self.layer(self.prepare(x).tensors)


class UsesNumbers(UsesNothing):
    def forward(self, x: Tensor) -> Any:
        batch = self.prepare(x)
        (height, width), scale = batch.sizes[0], batch.scale
        return self.layer(batch.tensors * (height - 2) + width * scale)


class Decides(UsesNothing):
    def forward(self, x: Tensor) -> Any:
        batch = self.prepare(x)
        h = batch.tensors * 2 if batch.sizes[0][0] > 20 else batch.tensors + 1
        return self.layer(h if batch.scale < 3 else -h)


class CountsInC(UsesNothing):
    def forward(self, x: Tensor) -> Any:
        batch = self.prepare(x)
        return self.layer(batch.tensors + sum({"a": batch.sizes[0][0]}.values()) + len("x" * batch.sizes[0][1]))


def example() -> Tensor:
    return torch.rand(1, 3, 16, 24)


@pytest.mark.parametrize("kind", [UsesNothing, UsesNumbers, Decides, CountsInC])
def test_other_sizes_give_the_values_of_the_model_or_are_refused(kind: type[UsesNothing]) -> None:
    model = kind().eval()
    extractor = featx.create_feature_extractor(model, ["layer"], example_inputs=example(), adaptive=False)
    refused = 0
    for shape in ((16, 24), (32, 16), (16, 40), (40, 48), (18, 22)):
        x = torch.rand(2, 3, *shape)
        try:
            found = extractor(x)["layer"]
        except featx.SpecializationError:
            refused += 1
        else:
            torch.testing.assert_close(found, model(x), rtol=0, atol=0)
    assert refused == {UsesNothing: 0, UsesNumbers: 0, Decides: 3, CountsInC: 4}[kind]


class ReturnsConstant(nn.Module):
    """Returns one object at every call, which it shares with the caller."""

    def __init__(self, batch: Batch) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 4, 3)
        self.pick = Pick(batch)

    def forward(self, x: Tensor) -> Any:
        return self.layer(x * self.pick(x).scale)


SHARED = Batch(torch.ones(2), [(3, 4)], 2.5)


class Pick(nn.Module):
    def __init__(self, batch: Batch) -> None:
        super().__init__()
        self.batch = batch

    def forward(self, x: Tensor) -> Batch:
        return self.batch if x.shape[0] < 100 else SHARED


class PickShared(Pick):
    def forward(self, x: Tensor) -> Batch:
        return SHARED


class PickOfClass(Pick):
    shared = SHARED

    def forward(self, x: Tensor) -> Batch:
        return self.shared


class PickOfLibrary(Pick):
    def forward(self, x: Tensor) -> Batch:
        return sys.modules["a_library"].settings[0]


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("a_library")
    vars(module)["settings"] = (Batch(torch.ones(2), [(3, 4)], 2.5),)
    monkeypatch.setitem(sys.modules, "a_library", module)


@pytest.mark.parametrize("kind", [Pick, PickShared, PickOfClass, PickOfLibrary])
def test_objects_that_outlive_the_trace_keep_their_numbers(kind: type[Pick]) -> None:
    model = ReturnsConstant(Batch(torch.ones(2), [(3, 4)], 2.5)).eval()
    model.pick = kind(model.pick.batch)
    batches = (model.pick.batch, SHARED, sys.modules["a_library"].settings[0])
    before = copy.deepcopy(batches)
    extractor = featx.create_feature_extractor(model, ["layer"], example_inputs=example())
    for batch, known in zip(batches, before, strict=True):
        assert (type(batch.scale), type(batch.sizes[0][0])) == (float, int)
        assert (batch.scale, batch.sizes, batch.name) == (known.scale, known.sizes, known.name)
    x = example()
    torch.testing.assert_close(extractor(x)["layer"], model(x), rtol=0, atol=0)


@pytest.mark.slow
def test_maps_of_a_detection_model_have_one_graph_for_all_sizes_of_an_image() -> None:
    torch.manual_seed(0)
    model = torchvision.models.detection.ssdlite320_mobilenet_v3_large(weights=None, weights_backbone=None).eval()
    extractor = featx.create_feature_extractor(model, ["backbone"], adaptive=False, suppress_diff_warning=True)
    expected: dict[str, Tensor] = {}
    model.backbone.register_forward_hook(lambda module, args, result: expected.update(result))
    for shape in ((128, 160), (97, 311), (320, 320), (500, 375)):
        images = [torch.rand(3, *shape)]
        with torch.no_grad():
            model(images)
            found = extractor(images)["backbone"]
        assert found.keys() == expected.keys()
        for key, value in found.items():
            torch.testing.assert_close(value, expected[key], rtol=0, atol=0)
