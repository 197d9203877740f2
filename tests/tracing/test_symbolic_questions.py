"""Questions that a proxy would answer for itself, and not for the value that it stands for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import featx

Scale = Callable[[torch.Tensor], float]


def in_a_set(x: torch.Tensor) -> float:
    return 2 if x.shape[0] in {2, 4} else 3


def size_in_a_dict(x: torch.Tensor) -> float:
    return {2: 5.0}.get(x.size(0), 1.0)


def shape_in_a_dict(x: torch.Tensor) -> float:
    return {torch.Size([2, 6]): 5.0}.get(x.shape, 1.0)


def dtype_in_a_dict(x: torch.Tensor) -> float:
    return {torch.float32: 2.0}.get(x.dtype, 9.0)


def matched(x: torch.Tensor) -> float:
    match x.shape:
        case (_, width):
            return width
        case _:
            return 100


def text_of_a_size(x: torch.Tensor) -> float:
    return 3 if f"{x.shape[0]}x{x.shape[1]}" == "2x6" else 1


def text_of_a_device(x: torch.Tensor) -> float:
    return 2 if str(x.device).startswith("cpu") else 3


def subclass(x: torch.Tensor) -> float:
    return 2 if issubclass(type(x), torch.Tensor) else 3


def has_attribute(x: torch.Tensor) -> float:
    return 2 if hasattr(x, "keys") else 3


def attribute_or_default(x: torch.Tensor) -> float:
    return getattr(x, "scale_of_mine", 3)


def is_callable(x: torch.Tensor) -> float:
    return 2 if callable(x) else 3


SCALES = [
    in_a_set, size_in_a_dict, shape_in_a_dict, dtype_in_a_dict, matched, text_of_a_size, text_of_a_device, subclass,
    has_attribute, attribute_or_default, is_callable,
]  # fmt: skip


class Scaled(nn.Module):
    def __init__(self, scale: Scale) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] < 0:
            raise ValueError(f"an odd shape: {x.shape}")
        return self.fc(x) * self.scale(x)


@pytest.mark.parametrize("scale", SCALES)
def test_symbolic_extractor_refuses_the_question(scale: Scale) -> None:
    with pytest.raises(featx.TraceError):
        featx.create_feature_extractor(Unchecked(scale).eval(), ["output"], tracer="symbolic")


@pytest.mark.parametrize("scale", SCALES)
def test_extractor_of_an_example_answers_it(scale: Scale) -> None:
    model, x = Scaled(scale).eval(), torch.rand(2, 6)
    assert torch.equal(featx.create_feature_extractor(model, ["output"])(x)["output"], model(x))


class Unchecked(Scaled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x) * self.scale(x)


class Says(nn.Module):
    """Makes a text for a person, and asks `hasattr` of what is no traced value."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._assert(x.shape[-1] == 6, f"six features are expected, got {x.shape}")
        return self.fc(x) if hasattr(self, "fc") else x


def test_messages_and_questions_about_modules_are_no_questions_about_values() -> None:
    model, x = Says().eval(), torch.rand(2, 6)
    assert torch.equal(featx.create_feature_extractor(model, ["fc"], tracer="symbolic")(x)["fc"], model(x))
