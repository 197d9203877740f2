"""What a model writes into its own tensors is seen by the values that depend on it, also when only those are wanted."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

import featx


class Recording(nn.Module):
    """Computes with parts of every kind and returns what it computed, by the name that featx gives it."""

    def __init__(self, compute: Callable[[Recording, torch.Tensor], dict[str, torch.Tensor]]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
        self.table = nn.Embedding(10, 4, max_norm=0.1)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("variance", torch.ones(4))
        self.compute = compute

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return self.compute(self, x)


def weight_written_before_the_leaf_reads_it(model: Recording, x: torch.Tensor) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        model.linear.weight.mul_(0.5)
    return {"linear": model.linear(x)}


def statistics_read_behind_the_norm(model: Recording, x: torch.Tensor) -> dict[str, torch.Tensor]:
    model.norm(x)
    return {"sub": x - model.norm.running_mean}


def second_call_of_a_spectral_norm(model: Recording, x: torch.Tensor) -> dict[str, torch.Tensor]:
    model.spectral(x)
    return {"spectral_1": model.spectral(x + 1)}


def first_call_of_a_spectral_norm(model: Recording, x: torch.Tensor) -> dict[str, torch.Tensor]:
    first = model.spectral(x)
    model.spectral(x + 1)
    return {"spectral": first}


def statistics_of_the_operator(model: Recording, x: torch.Tensor) -> dict[str, torch.Tensor]:
    torch.batch_norm(x, None, None, model.mean, model.variance, True, 0.1, 1e-5, False)
    return {"mul": x * model.mean}


def statistics_of_the_function_by_keyword(model: Recording, x: torch.Tensor) -> dict[str, torch.Tensor]:
    functional.batch_norm(x, running_var=model.variance, running_mean=model.mean, training=True)
    return {"mul": x * model.mean}


def table_that_a_lookup_scales(model: Recording, x: torch.Tensor) -> dict[str, torch.Tensor]:
    model.table(x.argmax(1))
    return {"mul": model.table.weight * 2}


@pytest.mark.slow
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize(
    "compute",
    [
        weight_written_before_the_leaf_reads_it,
        statistics_read_behind_the_norm,
        second_call_of_a_spectral_norm,
        first_call_of_a_spectral_norm,
        statistics_of_the_operator,
        statistics_of_the_function_by_keyword,
        table_that_a_lookup_scales,
    ],
)
def test_value_is_the_models_at_each_of_several_calls(
    compute: Callable[[Recording, torch.Tensor], dict[str, torch.Tensor]], training: bool
) -> None:
    model = Recording(compute).train(training)
    twin = copy.deepcopy(model)
    (name,) = twin(torch.randn(5, 4)).keys()
    twin = copy.deepcopy(model)
    extractor = featx.create_feature_extractor(model, [name], suppress_diff_warning=True)
    for seed in range(3):
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))
        expected = twin(x)[name].clone()
        assert torch.equal(extractor(x)[name], expected)


def test_value_before_a_region_without_gradients_needs_nothing_of_it() -> None:
    class Frozen(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            before = x + 1
            with torch.no_grad():
                inside = before * 2
            return inside + x

    extractor = featx.create_feature_extractor(Frozen(), ["add"])
    x = torch.randn(3)
    assert torch.equal(extractor(x)["add"], x + 1)
    assert "grad" not in extractor.code


class Holding(nn.Module):
    def __init__(self, compute: Callable[[Holding, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.register_buffer("whole", torch.ones(4))
        self.register_buffer("part", self.whole[:2])
        self.held = [torch.ones(4)]
        self.generator = random.Random(0)
        self.compute = compute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.compute(self, x)


def product_of_what_was_written(model: Holding, x: torch.Tensor) -> torch.Tensor:
    made = torch.zeros(4)
    made[:2] = x[0, :2]
    return x + made * 2


def sum_written_to_out(model: Holding, x: torch.Tensor) -> torch.Tensor:
    made = torch.empty(4)
    torch.sum(x, 0, out=made)
    return x + made * 2


def buffer_written_through_its_view(model: Holding, x: torch.Tensor) -> torch.Tensor:
    model.part.copy_(x[0, :2])
    return x + model.whole


@pytest.mark.parametrize("compute", [product_of_what_was_written, sum_written_to_out, buffer_written_through_its_view])
def test_last_sum_sees_what_was_written_before(compute: Callable[[Holding, torch.Tensor], torch.Tensor]) -> None:
    model = Holding(compute)
    twin = Holding(compute)
    extractor = featx.create_feature_extractor(model, ["add"])
    for _ in range(2):
        x = torch.randn(3, 4)
        assert torch.equal(extractor(x)["add"], twin(x))


def test_write_into_a_tensor_of_a_list_is_refused_and_not_done() -> None:
    model = Holding(lambda model, x: x * model.held[0].add_(1))
    with pytest.raises(featx.ModulePathError, match="register that tensor"):
        featx.create_feature_extractor(model, ["mul"])
    assert torch.equal(model.held[0], torch.ones(4))


def test_draw_from_a_generator_of_the_model_is_refused_and_taken_back() -> None:
    model = Holding(lambda model, x: x * model.generator.random())
    with pytest.raises(featx.TraceError, match="draws from its Random"):
        featx.create_feature_extractor(model, ["mul"])
    assert model.generator.random() == random.Random(0).random()
