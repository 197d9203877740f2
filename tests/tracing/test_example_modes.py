"""Train mode, autocast and gradients: a graph holds in the mode in which it was traced."""

from __future__ import annotations

import pytest
import torch
from agreement import agree, image, same
from torch import nn

import featx


class Modal(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if self.training else x + 1


def test_extractor_follows_the_mode_and_a_trace_is_of_one_mode() -> None:
    model = Modal()
    extractor = featx.create_feature_extractor(
        model, train_return_nodes={"mul": "y"}, eval_return_nodes={"add": "y"}, example_inputs=image(),
        suppress_diff_warning=True,
    )  # fmt: skip
    assert same(extractor.train()(image())["y"], image() * 2)
    assert same(extractor.eval()(image())["y"], image() + 1)
    assert model.training
    traced = featx.trace(model.eval(), image())
    assert same(traced.eval()(image()), image() + 1)
    with pytest.raises(featx.SpecializationError):
        traced.train()(image())


class Regions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            low = self.linear(x)
        with torch.no_grad():
            fixed = self.linear(x)
        return low, fixed, self.linear(x)


def test_autocast_and_no_grad_regions_hold_in_the_graph() -> None:
    traced = agree(Regions(), (image(),), (image(5),))
    low, fixed, free = traced(image())
    assert (low.dtype, fixed.dtype, free.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    assert (low.requires_grad, fixed.requires_grad, free.requires_grad) == (True, False, True)
    assert not torch.is_autocast_enabled("cpu")
