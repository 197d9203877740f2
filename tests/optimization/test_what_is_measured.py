"""optimize: errors that must not be overlooked, other forms of inputs, and what stays as it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import featx
from featx.errors import ArgumentTypeError, OptimizationError
from featx.examples import Example
from featx.optimization import search
from featx.optimization.inputs import OTHER_FORM, validation_inputs
from featx.optimization.measure import relative_errors
from featx.passes import fold_layer_scale, fuse_conv_bn


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time for moments, and take it that there is no time to compile, and that nothing is hopeless."""
    monkeypatch.setattr(search, "_SECONDS", 0.0)
    monkeypatch.setattr(search, "_LAST_SECONDS", 0.0)
    monkeypatch.setattr(search, "_SECONDS_TO_COMPILE", 1e9)
    monkeypatch.setattr(search, "_HOPELESS", 1e9)


def optimized(model: nn.Module, example: Any = None, made_on: Any = None, **options: Any) -> featx.OptimizedExtractor:
    made_on = example if made_on is None else made_on
    extractor = featx.create_feature_extractor(model.eval(), {"output": "y"}, example_inputs=made_on)
    return featx.optimize(extractor, example, progress=False, **options)


def test_numbers_of_samples_are_samples() -> None:
    exact, found = torch.tensor([1e4, 1.0]), torch.tensor([1e4, 2.0])
    assert relative_errors({"y": exact}, {"y": found}) == {"y": 1.0}
    assert relative_errors({"y": exact[0]}, {"y": found[1]}) == {"y": 1 - 2e-4}


@pytest.mark.parametrize("size", [1e-217, 1e-310, 1.0, 1e200, 1e307])
def test_errors_of_very_small_and_large_numbers(size: float) -> None:
    exact = torch.full((2, 3), size, dtype=torch.float64)
    assert relative_errors({"y": exact}, {"y": exact * 3})["y"] == pytest.approx(2.0)
    assert relative_errors({"y": exact}, {"y": exact * 0}) == {"y": 1.0}


def test_integers_of_each_sample_get_an_order_of_their_own() -> None:
    ids = torch.arange(1, 33).repeat(4, 1)
    found = validation_inputs(Example((ids,), {}, "given"))["integers in another order"].args[0]
    assert len({tuple(row) for row in found.tolist()}) == 4
    assert torch.equal(found.sort(-1).values, ids)


class Folds(nn.Module):
    """Looks at two rows as one, of which the batch has to have the memory in one piece."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length, batch, _ = x.shape
        parts = [layer(x).view(length, batch * 2, 4) for layer in (self.query, self.key, self.value)]
        return (parts[0] * parts[1] + parts[2]).reshape(length, batch, 8).transpose(0, 1)


class Turned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.folds = Folds()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.folds(x.transpose(0, 1))


def test_merged_layers_whose_results_are_looked_at_in_one_piece_run_for_another_number_of_samples() -> None:
    plan = optimized(Turned(), torch.rand(1, 5, 8), tolerance=1e-3).plan
    assert plan is not None
    assert OTHER_FORM in plan.inputs
    merged = [trial for trial in plan.trials if "merge_parallel_linears" in trial.recipe.rewrites]
    assert merged
    assert not any("view size" in trial.problem for trial in merged)


class Unfolds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, stride=8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x).view(len(x), -1)


def test_what_fails_for_another_size_of_images_is_not_chosen() -> None:
    plan = optimized(Unfolds(), torch.rand(2, 3, 8, 8), tolerance=1e-3).plan
    assert plan is not None
    turned = [trial for trial in plan.trials if trial.recipe.channels_last and trial.recipe.dtype is None]
    assert turned
    assert all("view size is not compatible" in trial.problem for trial in turned)


class Counts(nn.Module):
    """Counts its calls, which change nothing that it returns, and writes its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.linear(x.mul_(2))


def test_model_and_example_stay_as_they_were() -> None:
    counts, x = Counts(), torch.rand(8, 4)
    given, calls = x.clone(), counts.calls
    model = nn.Sequential(counts, nn.ReLU())  # in which it is one call: of its own graph, what counts is cut out
    optimized(model, x, made_on=torch.rand(8, 4), budget=2)
    assert torch.equal(x, given)
    assert counts.calls is calls
    assert int(calls) == 0
    featx.create_feature_extractor(model.eval(), ["output"], example_inputs=x)(x)
    assert int(calls) == 1


class Adapts(nn.Module):
    """Updates the statistics of its batch norm in eval mode too, which counts no write of these buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.batch_norm(x, self.norm.running_mean, self.norm.running_var, training=True)


def test_statistics_that_eval_mode_updates_stay_as_they_were() -> None:
    adapts = Adapts()
    optimized(nn.Sequential(adapts, nn.ReLU()), torch.rand(8, 4), budget=2)
    assert adapts.norm.running_mean is not None
    assert torch.equal(adapts.norm.running_mean, torch.zeros(4))


def test_without_inputs_the_plan_says_what_errors_are_of() -> None:
    plan = optimized(nn.Sequential(nn.Linear(4, 4)), made_on=torch.rand(2, 4), budget=0).plan
    assert plan is not None
    assert plan.inputs[0] == "random values in the form of the example"


@pytest.mark.parametrize(
    "change",
    [
        {"recipe": {"dtype": "bfloat16"}},
        {"tolerance": 0.5},
        {"chosen": {"errors": {"y": None}}},
        {"dtypes": None},
        {"checksum": ""},
    ],
)
def test_a_plan_that_was_edited_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    plan = optimized(nn.Sequential(nn.Linear(4, 4)), torch.rand(2, 4), budget=0).plan
    assert plan is not None
    plan.save(file)
    assert featx.Plan.load(file) == plan
    written = json.loads(file.read_text())
    edited = {key: {**written[key], **value} if isinstance(value, dict) else value for key, value in change.items()}
    file.write_text(json.dumps({**written, **edited}))
    with pytest.raises(OptimizationError, match="the plan is not as it was measured"):
        featx.Plan.load(file)


def test_a_plan_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    plan = optimized(nn.Sequential(nn.Linear(4, 4)), torch.rand(2, 4), budget=0).plan
    assert plan is not None
    with pytest.raises(OptimizationError, match=r"the plan cannot be written to '.*none/plan.json': No such file"):
        plan.save(tmp_path / "none" / "plan.json")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"checks": {1: torch.rand(2, 4)}}, "checks must be inputs by name, .* got 1"),
        ({"checks": {"the example": torch.rand(2, 4)}}, "has the name of inputs that are checked anyway"),
        ({"tolerance": True}, "tolerance must be a number of at least 0, got True"),
        ({"tolerance": float("nan")}, "tolerance must be a number of at least 0, got nan"),
    ],
)
def test_arguments_that_mean_nothing_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentTypeError, match=words):
        optimized(nn.Sequential(nn.Linear(4, 4)), torch.rand(2, 4), budget=0, **options)


def test_a_number_of_numpy_is_a_tolerance() -> None:
    plan = optimized(nn.Sequential(nn.Linear(4, 4)), torch.rand(2, 4), budget=0, tolerance=np.float32(0.5)).plan
    assert plan is not None
    assert plan.tolerance == 0.5


class Scaled(nn.Module):
    def __init__(self, layer: nn.Module, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.layer, self.scale = layer, nn.Parameter(torch.rand(shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.scale


@pytest.mark.parametrize(
    ("layer", "shape", "size"),
    [
        (nn.Linear(8, 8), (1, 1, 8), (3, 8)),
        (nn.Linear(8, 8), (1, 1, 8), (2, 3, 8)),
        (nn.Linear(8, 8), (8,), (3, 8)),
        (nn.Conv2d(3, 5, 1), (1, 5, 1, 1), (3, 4, 4)),
        (nn.Conv2d(3, 5, 1), (1, 5, 1, 1), (2, 3, 4, 4)),
    ],
)
def test_a_layer_scale_that_adds_dimensions_still_does(
    layer: nn.Module, shape: tuple[int, ...], size: tuple[int, ...]
) -> None:
    model, x = Scaled(layer, shape).eval(), torch.rand(size)
    extractor = featx.create_feature_extractor(model, {"output": "y"}, example_inputs=x).eval()
    expected = extractor(x)["y"]
    fold_layer_scale(extractor)
    found = extractor(x)["y"]
    assert found.shape == expected.shape
    assert torch.allclose(found, expected, atol=1e-6)


def test_what_a_layer_holds_none_in_is_no_bias() -> None:
    conv = nn.Conv2d(3, 4, 1, bias=False)
    conv.register_buffer("mask", None)
    conv.note = None
    model = nn.Sequential(conv, nn.BatchNorm2d(4)).eval()
    fused = featx.trace(model, torch.rand(1, 3, 4, 4))
    assert fuse_conv_bn(fused)
    (twin,) = [module for module in fused.modules() if isinstance(module, nn.Conv2d)]
    assert twin.bias is not None
    assert twin.mask is None
    assert twin.note is None
    assert {name.rpartition(".")[2] for name in fused.state_dict()} == {"weight", "bias"}
