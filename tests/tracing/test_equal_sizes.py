"""Sizes that are equal in the example, and that C code, which no trace hears, compares or combines."""

from __future__ import annotations

import fractions
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import featx

COMBINED: dict[str, Callable[[Any, Any], Any]] = {
    "fraction": lambda height, width: fractions.Fraction(height, width).numerator,
    "array": lambda height, width: float(np.eye(height, width).sum(0).min()) + 1,
    "lengths": lambda height, width: len([0] * height) - len([0] * width) + 1,
    "lists": lambda height, width: ([0] * height == [0] * width) + 1,
    "index": lambda height, width: height.__index__() - width.__index__() + 1,
    "texts": lambda height, width: ("a".ljust(height) == "a".ljust(width)) + 1,
    "plain": lambda height, width: height - width + 1,
}


class Combined(nn.Module):
    def __init__(self, combine: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.combine, self.out = combine, nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        height, width = x.shape[2:]
        return self.out(x * self.combine(height, width))


@pytest.mark.slow
@pytest.mark.parametrize("name", COMBINED)
def test_square_example_says_nothing_of_other_images(name: str) -> None:
    model = Combined(COMBINED[name])
    extractor = featx.create_feature_extractor(model, ["out"], example_inputs=torch.rand(2, 3, 8, 8))
    for shape in ((2, 3, 8, 8), (2, 3, 12, 8), (2, 3, 12, 9), (2, 3, 8, 64), (2, 3, 6, 4), (5, 3, 8, 8)):
        image = torch.rand(shape)
        try:
            found = extractor(image)["out"]
        except featx.SpecializationError:
            assert shape != (2, 3, 8, 8)
            assert name != "plain"
            continue
        assert torch.equal(found, model(image))
