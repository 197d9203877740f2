"""Models that write the data of their weights with `weight.data *= mask`, which assigns the data to itself."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import featx


class Masked(nn.Conv2d):
    """Masks its weights in each call, as PixelCNN does."""

    def __init__(self) -> None:
        super().__init__(1, 2, 3)
        self.register_buffer("mask", (torch.rand_like(self.weight) > 0.5).float())

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self.weight.data *= self.mask
        return super().forward(input)


class ByValue(Masked):
    """Runs for real in a trace, as it asks for a value."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self.weight.data *= self.mask if input.sum() > 0 else self.mask / 2
        return nn.Conv2d.forward(self, input)


class Averaged(nn.Module):
    """Keeps an average of the weights of one layer in another one."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Conv2d(1, 2, 3), nn.Conv2d(1, 2, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for own, other in zip(self.key.parameters(), self.query.parameters(), strict=True):
                own.data *= 0.9
                own.data += other.data * 0.1
        return self.query(x) * self.key(x)


class Replaced(nn.Conv2d):
    """Gives its weights other memory."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self.weight.data = self.weight.data * 0.5
        return super().forward(input)


class Turned(nn.Conv2d):
    """Gives its weights another view of their memory."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self.weight.data = self.weight.data.transpose(2, 3)
        return super().forward(input)


@pytest.mark.parametrize("make", [Masked, ByValue, Averaged])
@pytest.mark.parametrize("training", [False, True])
def test_data_that_is_assigned_to_itself_is_written_alone(make: Callable[[], nn.Module], training: bool) -> None:
    torch.manual_seed(0)
    model = make().train(training)
    eager, untouched = copy.deepcopy(model), copy.deepcopy(model.state_dict())
    x = torch.rand(2, 1, 6, 6)
    extractor = featx.create_feature_extractor(model, ["output"], example_inputs=x)
    assert all(torch.equal(value, untouched[name]) for name, value in model.state_dict().items())
    for factor in (1.0, 2.0, 0.5):
        found, expected = extractor(factor * x)["output"], eager(factor * x)
        assert torch.equal(found, expected)
        assert all(torch.equal(value, model.state_dict()[name]) for name, value in eager.state_dict().items())
        gradients, wanted = (
            torch.autograd.grad(result.square().sum(), tuple(of.parameters()))
            for result, of in ((found, model), (expected, eager))
        )
        assert all(map(torch.equal, gradients, wanted))


@pytest.mark.parametrize("make", [Replaced, Turned])
def test_data_that_is_assigned_from_elsewhere_is_refused(make: Callable[..., nn.Module]) -> None:
    with pytest.raises(
        featx.TraceError, match=r"'data' of a tensor is assigned \(tensor\.data\.copy_\(value\) writes it"
    ):
        featx.create_feature_extractor(make(1, 2, 3), ["output"], example_inputs=torch.rand(2, 1, 6, 6))
