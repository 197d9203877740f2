"""Layers that forward makes, with parameters of their own: their parameters are made of followed tensors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import featx


class Normalizes(nn.Module):
    """Makes a layer norm for the size of each map, as code does that is to take any size."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        y = nn.LayerNorm(y.size()[1:])(y)
        scale = nn.Parameter(torch.arange(1.0, 5.0), requires_grad=False)
        return y * scale[:, None, None]


@pytest.mark.parametrize("shape", [(2, 3, 8, 8), (3, 3, 8, 8), (2, 3, 10, 13)])
def test_a_layer_that_forward_makes_is_followed(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = Normalizes().eval()
    extractor = featx.create_feature_extractor(model, ["layer_norm", "output"], example_inputs=torch.rand(2, 3, 8, 8))
    x = torch.rand(shape)
    found, expected = extractor(x), model(x)
    assert torch.equal(found["output"], expected)
    assert torch.equal(found["layer_norm"], nn.LayerNorm(found["layer_norm"].shape[1:])(model.first(x)))
    gradients = [torch.autograd.grad(each.sum(), model.first.weight)[0] for each in (found["output"], expected)]
    assert torch.equal(*gradients)


class Draws(nn.Module):
    def __init__(self, initialize: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self.first, self.initialize = nn.Linear(4, 4), initialize

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.Linear(4, 4)(self.first(x))
        weight = nn.Parameter(torch.empty(4, 4))
        self.initialize(weight)
        return y @ weight


@pytest.mark.parametrize("name", ["uniform_", "normal_", "kaiming_uniform_", "xavier_normal_", "orthogonal_", "ones_"])
def test_initial_values_are_drawn_in_each_call(name: str) -> None:
    model, x = Draws(getattr(nn.init, name)).eval(), torch.rand(2, 4)
    extractor = featx.create_feature_extractor(model, ["output"], example_inputs=x)
    values: list[torch.Tensor] = []
    for seed in (3, 4):
        torch.manual_seed(seed)
        expected = model(x)
        torch.manual_seed(seed)
        values.append(extractor(x)["output"])
        assert torch.equal(values[-1], expected)
    assert not torch.equal(*values)


class Elsewhere(nn.Module):
    """Uses a parameter that is registered nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = [nn.Parameter(torch.ones(4))]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.hidden[0]


def test_a_parameter_that_the_model_does_not_own_is_refused() -> None:
    with pytest.raises(featx.TraceError, match=r"a parameter of shape \(4,\) that the model does not own"):
        featx.trace(Elsewhere(), example_inputs=torch.rand(2, 4))
