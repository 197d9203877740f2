"""What cannot be followed on a guessed example is refused: a symbolic trace would not notice it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import featx


def seeded(model: Model, x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(3)
    return model.net(x) + torch.randn(6)


def seeded_apart(model: Model, x: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        noise = torch.randn(6)
    return model.net(x) + noise


def with_other_weights(model: Model, x: torch.Tensor) -> torch.Tensor:
    kept = model.net._parameters.pop("weight")
    model.net.weight = x.mean(0) * torch.ones(6, 6)  # type: ignore[assignment]
    y = model.net(x)
    del model.net.weight
    model.net._parameters["weight"] = kept
    return y


def with_a_hook(model: Model, x: torch.Tensor) -> torch.Tensor:
    handle = model.net.register_forward_hook(lambda module, args, result: result * 3)
    y = model.net(x)
    handle.remove()
    return y


def tried(model: Model, x: torch.Tensor) -> torch.Tensor:
    try:
        return x.view(-1, 12)
    except RuntimeError:
        return model.net(x)


class Model(nn.Module):
    def __init__(self, run: Callable[[Model, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.net = nn.Linear(6, 6)
        self.run = run

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(self, self.first(x))


@pytest.mark.parametrize("run", [seeded, seeded_apart, with_other_weights, with_a_hook, tried])
def test_refusal_of_the_example_tracer_holds(run: Callable[[Model, torch.Tensor], torch.Tensor]) -> None:
    with pytest.raises(featx.TraceError, match=r"inputs guessed from the first Linear: .* Give example_inputs"):
        featx.create_feature_extractor(Model(run).eval(), ["output"])
