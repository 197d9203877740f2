"""Arrays of numpy in forward: constants of the graph, made anew where the model may write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import featx


class Model(nn.Module):
    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.grid = np.arange(4, dtype=np.float32)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, self.linear(x))


def written(model: Model, x: torch.Tensor) -> torch.Tensor:
    table = torch.tensor(model.grid)
    table[0] = x[0, 0].detach()
    return x * table


def written_with_the_array(model: Model, x: torch.Tensor) -> torch.Tensor:
    table = torch.as_tensor(model.grid)
    table += 1
    return x * table


def counted_in_the_array(model: Model, x: torch.Tensor) -> torch.Tensor:
    model.grid += 1
    return x * torch.tensor(model.grid)


TAKEN: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "tensor": lambda model, x: x * torch.tensor(model.grid),
    "tensor of another dtype": lambda model, x: x * torch.tensor(model.grid, dtype=torch.float64, device=x.device),
    "as_tensor": lambda model, x: x * torch.as_tensor(model.grid, device=x.device),
    "from_numpy": lambda model, x: x * torch.from_numpy(model.grid),
    "indices": lambda model, x: x[:, np.array([2, 0])],
    "mask": lambda model, x: x[:, np.array([True, False, True, True])],
    "truth values": lambda model, x: torch.where(torch.tensor(np.arange(4) > 1), x, -x),
    "several": lambda model, x: x * torch.stack([torch.tensor(model.grid + step) for step in range(2)]).sum(0),
    "written": written,
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", TAKEN)
def test_it_is_a_constant(name: str) -> None:
    model = Model(TAKEN[name]).eval()
    x = torch.randn(3, 4)
    extractor = featx.create_feature_extractor(model, {"output": "y"}, example_inputs=x).eval()
    for inputs in (x, x + 1, torch.randn(5, 4), x):
        assert torch.equal(extractor(inputs)["y"], model(inputs))


@pytest.mark.parametrize("function", [written_with_the_array, counted_in_the_array])
def test_what_would_change_the_next_call_is_refused(function: Callable[..., torch.Tensor]) -> None:
    model = Model(function).eval()
    with pytest.raises(featx.TraceError):
        featx.create_feature_extractor(model, ["output"], example_inputs=torch.randn(3, 4))
    assert model.grid.tolist() == [0, 1, 2, 3]


def test_an_array_that_follows_from_a_size_is_fixed_and_the_way_out_told() -> None:
    def ramp(model: Model, x: torch.Tensor) -> torch.Tensor:
        return x * torch.tensor(np.linspace(0, 2, x.shape[0], dtype=np.float32) / 2)[:, None]

    model = Model(ramp).eval()
    x, longer = torch.randn(3, 4), torch.randn(5, 4)
    extractor = featx.create_feature_extractor(model, {"output": "y"}, example_inputs=x).eval()
    assert torch.equal(extractor(x)["y"], model(x))
    with pytest.raises(featx.SpecializationError, match=r"failed, perhaps because numpy .* pass adaptive=True"):
        extractor(longer)
    adaptive = featx.create_feature_extractor(model, {"output": "y"}, example_inputs=x, adaptive=True).eval()
    assert torch.equal(adaptive(longer)["y"], model(longer))
