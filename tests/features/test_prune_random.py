"""With one seed the extractor draws the numbers that the model draws, also where earlier draws are not wanted."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrize

import featx

pytestmark = pytest.mark.fuzzing

Draw = Callable[[torch.Tensor], Any]

FUNCTIONS: dict[str, Draw] = {
    "native_dropout": lambda x: torch.native_dropout(x, 0.5, True),
    "feature_dropout": lambda x: torch.feature_dropout(x, 0.5, True),
    "feature_dropout_": lambda x: torch.feature_dropout_(x * 1, 0.5, True),
    "dropout_": lambda x: torch.dropout_(x * 1, 0.5, True),
    "alpha_dropout_": lambda x: torch.alpha_dropout_(x * 1, 0.5, True),
    "rrelu_": lambda x: torch.rrelu_(x * -1, training=True),
    "fractional_max_pool2d": lambda x: functional.fractional_max_pool2d(x[None, None], 2, output_size=2),
    "fractional_max_pool2d_with_indices": lambda x: functional.fractional_max_pool2d_with_indices(
        x[None, None], 2, output_size=2
    ),
    "_standard_gamma": lambda x: torch._standard_gamma(x.abs() + 1),
    "_sample_dirichlet": lambda x: torch._sample_dirichlet(x.abs() + 1),
    "svd_lowrank": lambda x: torch.svd_lowrank(x, 2),
    "pca_lowrank": lambda x: torch.pca_lowrank(x, 2),
}


class Then(nn.Module):
    """Draws, or lets a module draw, and then drops out."""

    def __init__(self, draw: Draw | None = None, module: nn.Module | None = None) -> None:
        super().__init__()
        self.draw, self.module = draw, module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.draw is not None:
            self.draw(x)
        if self.module is not None:
            self.module(x)
        return functional.dropout(x * 2, 0.5, True)


class Noise(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.randn_like(x)


def hooked() -> nn.Module:
    module = nn.Dropout(0.5)
    module.register_forward_hook(lambda module, args, output: None)
    return module


def parametrized() -> nn.Module:
    module = nn.Linear(4, 4)
    parametrize.register_parametrization(module, "weight", Noise())
    return module


MODULES: dict[str, Callable[[], nn.Module]] = {
    "dropout with a hook": hooked,
    "leaf of the user": Noise,
    "random parametrization": parametrized,
}


def check(model: nn.Module) -> None:
    x = torch.randn(4, 4)
    extractor = featx.create_feature_extractor(model, ["dropout"], tracer_kwargs={"leaf_modules": [Noise]})
    torch.manual_seed(1)
    expected = copy.deepcopy(model)(x)
    torch.manual_seed(1)
    assert torch.equal(extractor(x)["dropout"], expected)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_numbers_are_the_models_behind_a_function_that_draws(name: str) -> None:
    check(Then(FUNCTIONS[name]))


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("training", [True, False])
def test_numbers_are_the_models_behind_a_module_that_draws(name: str, training: bool) -> None:
    check(Then(module=MODULES[name]()).train(training))


def test_second_read_of_a_random_parametrization_is_the_second_of_the_model() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(4))
            parametrize.register_parametrization(self, "w", Noise())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.w).sum() + (x * self.w).mean()

    model = Twice()
    names = [name for name in featx.get_graph_node_names(model)[1] if name.startswith("parametrizations")]
    extractor = featx.create_feature_extractor(model, names[-1:])
    seen: list[torch.Tensor] = []
    twin = copy.deepcopy(model)
    twin.parametrizations.w.register_forward_hook(lambda module, args, output: seen.append(output))  # type: ignore[union-attr]
    x = torch.ones(4)
    torch.manual_seed(1)
    twin(x)
    torch.manual_seed(1)
    (value,) = extractor(x).values()
    assert torch.equal(value, seen[1])
