"""Lists, dicts and objects that are passed to modules: numbers that these put there, and objects of unusual classes."""

from __future__ import annotations

import abc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import featx

X = torch.rand(2, 3, 16, 16)


class Level(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, 2, 1)

    def forward(self, x: torch.Tensor, shapes: Any) -> torch.Tensor:
        x = self.conv(x)
        if isinstance(shapes, list):
            shapes.append(x.shape[2] * x.shape[3])
        else:
            shapes["n"] = x.shape[2] * x.shape[3]
        return x


class Pyramid(nn.Module):
    """Collects the sizes of its levels, as deformable attention does."""

    def __init__(self, kind: type) -> None:
        super().__init__()
        self.levels, self.head, self.kind = nn.ModuleList([Level(), Level()]), nn.Conv2d(3, 2, 1), kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shapes = self.kind()
        for level in self.levels:
            x = level(x, shapes)
        return self.head(x / (shapes[0] + shapes[1] if isinstance(shapes, list) else shapes["n"]))


@pytest.mark.parametrize(
    "names", [["output"], ["head"], ["levels.0", "output"], ["levels.0.conv", "head"]], ids=" ".join
)
@pytest.mark.parametrize("kind", [list, dict])
def test_number_that_a_module_puts_into_a_container_is_followed(kind: type, names: list[str]) -> None:
    model = Pyramid(kind).eval()
    extractor = featx.create_feature_extractor(model, names, example_inputs=X)
    for shape in ((2, 3, 16, 16), (3, 3, 32, 16), (1, 3, 8, 24)):
        x = torch.rand(shape)
        assert torch.equal(extractor(x)[names[-1]], model(x))


class Data(abc.ABC):  # noqa: B024 - as that of torch_geometric
    """Data that can be called, as that of torch_geometric."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def __call__(self) -> Iterator[str]:
        return iter(["x"])


# A class that is made while the program runs has `abc` as its module.
Batch: Any = abc.ABCMeta("Batch", (Data,), {})


@pytest.mark.parametrize("kind", [Data, Batch])
def test_tensors_of_an_object_that_can_be_called_are_followed(kind: Any) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, data: Any) -> torch.Tensor:
            return self.linear(data.x)

    model, data = Net(), kind(torch.rand(3, 4))
    extractor = featx.create_feature_extractor(model, ["linear"], example_inputs=(data,))
    data.x = torch.rand(5, 4)
    for other in (data, kind(torch.rand(2, 4))):
        assert torch.equal(extractor(other)["linear"], model(other))


@torch.fx.wrap
def clip(window: list[int], size: list[int]) -> list[int]:
    for i, length in enumerate(size):
        if length <= window[i]:
            window[i] = length
    return window


class WindowAttention(nn.Module):
    """Clips its window in a function that is one node, as the video Swin of torchvision does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.window = nn.Linear(3, 3), [40, 4]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        height, width = x.shape[1:3]
        window = clip(self.window.copy(), [height, width])
        return self.linear(x[:, : window[0], : window[1]])


def test_names_of_nodes_that_were_taken_back_are_given_again() -> None:
    """Runs at other sizes keep the module whole from the start, and are compared with this one by the names."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.head = WindowAttention(), nn.Linear(3, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.attention(x.movedim(1, -1))
            return self.head(x).reshape(x.shape[0], x.shape[1] * x.shape[2] * 2)

    model = Net().eval()
    graph_module = featx.trace(model, X)
    for shape in ((2, 3, 16, 16), (3, 3, 20, 16), (1, 3, 8, 24)):
        x = torch.rand(shape)
        assert torch.equal(graph_module(x), model(x))
