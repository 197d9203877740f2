"""Inputs that require gradients, where forward asks whether they do."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import featx


class Asks(nn.Module):
    """Does something else for an input that requires a gradient, or that is no leaf."""

    def __init__(self, question: str) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(6, 6), nn.Linear(6, 6)
        self.question = question

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.before(x)
        if self.question == "requires_grad" and x.requires_grad:
            y = y * 2
        if self.question == "is_leaf" and x.is_leaf:
            y = y * 3
        if self.question == "checkpoint" and self.training and x.requires_grad:
            return checkpoint(self.after, y, use_reentrant=False)
        return self.after(y)


def made(width: int, kind: str) -> torch.Tensor:
    x = torch.rand(2, width, 6)
    if kind == "plain":
        return x
    x.requires_grad_()
    return x if kind == "leaf" else x * 1


@pytest.mark.parametrize("adaptive", [None, True])
@pytest.mark.parametrize("first", ["plain", "leaf", "no leaf"])
@pytest.mark.parametrize("question", ["requires_grad", "is_leaf", "checkpoint"])
@pytest.mark.parametrize("width", [3, 1000])
def test_each_input_has_the_value_of_the_model(width: int, question: str, first: str, adaptive: bool | None) -> None:
    torch.manual_seed(0)
    model = Asks(question).train()
    extractor = featx.create_feature_extractor(
        model, ["after"], example_inputs=made(width, first), adaptive=adaptive, suppress_diff_warning=True
    )
    for kind in ("plain", "leaf", "no leaf"):
        x = made(width, kind)
        found, expected = extractor(x)["after"], model(x)
        assert torch.equal(found, expected)
        if x.requires_grad:
            for each in zip(*(torch.autograd.grad(y.sum(), x) for y in (found, expected)), strict=True):
                torch.testing.assert_close(*each)
