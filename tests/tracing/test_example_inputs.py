"""Inputs that are keywords, left out or nested."""

from __future__ import annotations

import pytest
import torch
from agreement import image, same
from torch import nn

import featx


class Inputs(nn.Module):
    def forward(
        self, x: torch.Tensor, mask: torch.Tensor | None = None, scale: float = 2.0, *, shift: torch.Tensor
    ) -> torch.Tensor:
        if mask is not None:
            x = x * mask
        return x * scale + shift


def test_keyword_only_input_is_an_input_and_what_is_left_out_is_checked() -> None:
    model, shift = Inputs(), image(seed=1)
    traced = featx.trace(model, image(), shift=shift)
    assert same(traced(image(), shift=shift), model(image(), shift=shift))
    with pytest.raises(featx.FeatxError):
        traced(image(), image(seed=2), shift=shift)
    with pytest.raises(featx.FeatxError):
        traced(image(), None, 3.0, shift=shift)
    masked = featx.trace(model, image(), image(seed=2), 3.0, shift=shift)
    assert same(masked(image(), image(seed=4), 3.0, shift=shift), model(image(), image(seed=4), 3.0, shift=shift))
    with pytest.raises(featx.FeatxError):
        masked(image(), shift=shift)


class Nested(nn.Module):
    def forward(self, xs: list[torch.Tensor], more: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        total = more["pair"][0] * more["pair"][1]
        for x in xs:
            total = total + x.mean(0)
        return total


def test_nested_inputs_are_followed_and_their_form_is_checked() -> None:
    model = Nested()
    more = {"pair": (image(1), image(1, seed=1))}
    traced = featx.trace(model, [image(2), image(3)], more)
    other = [image(4, seed=5), image(4, seed=6)]
    assert same(traced(other, more), model(other, more))
    with pytest.raises(featx.SpecializationError):
        traced([*other, image()], more)
