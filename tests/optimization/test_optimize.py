"""optimize: what it chooses, what it refuses, and plans."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import featx
from featx.errors import ArgumentTypeError, OptimizationError
from featx.features.dual import DualGraphModule
from featx.optimization import hardware, measure, search
from featx.optimization.inputs import LONGER, OTHER_FORM, validation_inputs
from featx.optimization.measure import relative_errors
from featx.optimization.module import OptimizedExtractor
from featx.optimization.recipe import Recipe


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time for moments, and take it that there is no time to compile."""
    monkeypatch.setattr(search, "_SECONDS", 0.0)
    monkeypatch.setattr(search, "_LAST_SECONDS", 0.0)
    monkeypatch.setattr(search, "_SECONDS_TO_COMPILE", 1e9)


def times_by(monkeypatch: pytest.MonkeyPatch, ratio: float | Callable[[], float]) -> None:
    """Let whatever is timed take that much of the exact extractor's time."""

    def time_in_turn(functions: Sequence[Any], seconds: float, wait: Any) -> list[float]:
        return [1.0, *[ratio() if callable(ratio) else ratio for _ in functions[1:]]]

    monkeypatch.setattr(search, "time_in_turn", time_in_turn)
    monkeypatch.setattr(search, "time_once", lambda function, wait: 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("tolerance", [1e-1, 1e-2, 1e-4, 1e-6])
def test_errors_are_within_the_tolerance(
    tolerance: float, extractor: DualGraphModule, images: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    ratios = iter(range(99, 0, -1))
    times_by(monkeypatch, lambda: next(ratios) / 100)  # the later, the faster
    optimized = featx.optimize(extractor, images, tolerance=tolerance, progress=False)
    with torch.no_grad():
        expected = extractor(images)
    errors = relative_errors(expected, optimized(images))
    assert max(errors.values()) <= tolerance
    plan = optimized.plan
    assert plan is not None
    assert plan.recipe == optimized.recipe
    assert plan.chosen.error <= tolerance
    assert {trial.recipe.dtype for trial in plan.trials} == {None, "bfloat16", "float16"}
    assert optimized.recipe.dtype == ("float16" if tolerance >= 1e-2 else None)


@pytest.mark.slow
def test_tolerance_0_tries_what_is_exact(extractor: DualGraphModule, images: torch.Tensor) -> None:
    plan = featx.optimize(extractor, images, tolerance=0, progress=False).plan
    assert plan is not None
    assert [trial.recipe for trial in plan.trials] == [Recipe(rewrites=("remove_dropout", "remove_identity"))]
    assert plan.trials[0].error == 0


@pytest.mark.slow
def test_nothing_slower_is_returned(
    extractor: DualGraphModule, images: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    times_by(monkeypatch, 1.01)
    optimized = featx.optimize(extractor, images, progress=False)
    assert optimized.recipe == Recipe()
    assert torch.equal(optimized(images)["map"], extractor(images)["map"])


@pytest.mark.slow
def test_one_slow_call_ends_no_trial(
    extractor: DualGraphModule, images: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    times_by(monkeypatch, 0.5)
    calls = iter([90.0, 1.0, *[1.0] * 1000])  # what is tried first is interrupted in its first call
    monkeypatch.setattr(search, "time_once", lambda function, wait: next(calls))
    plan = featx.optimize(extractor, images, tolerance=0, progress=False).plan
    assert plan is not None
    assert all(trial.ratio == 0.5 for trial in plan.trials if not trial.problem)
    assert plan.chosen.recipe != Recipe()


def test_what_is_slow_in_each_call_is_not_timed(
    extractor: DualGraphModule, images: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    times_by(monkeypatch, 0.5)
    calls = iter([90.0, 1.0] * 1000)  # in turn what is tried, and the exact extractor
    monkeypatch.setattr(search, "time_once", lambda function, wait: next(calls))
    plan = featx.optimize(extractor, images, tolerance=0, progress=False).plan
    assert plan is not None
    assert plan.chosen.recipe == Recipe()
    assert "not timed: a call takes 90.0 times as long" in str(plan)


@pytest.mark.slow
def test_a_dtype_that_is_slow_on_one_row_is_computed_on_no_more(
    extractor: DualGraphModule, images: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU without instructions for it, a call in bfloat16 takes some 30 times as long."""
    times_by(monkeypatch, 0.5)
    called: list[tuple[str | None, int]] = []
    forward = OptimizedExtractor.forward

    def noted(module: OptimizedExtractor, x: torch.Tensor) -> Any:
        called.append((module.recipe.dtype, len(x)))
        return forward(module, x)

    def time_once(function: Callable[[], Any], wait: Any) -> float:
        before = len(called)
        function()
        return 30.0 if called[before:] and called[-1][0] == "bfloat16" else 1.0

    monkeypatch.setattr(OptimizedExtractor, "forward", noted)
    monkeypatch.setattr(search, "time_once", time_once)
    plan = featx.optimize(extractor, images, tolerance=0.1, progress=False).plan
    assert plan is not None
    assert len(images) > 1
    assert {rows for dtype, rows in called if dtype == "bfloat16"} == {1}
    assert {rows for dtype, rows in called if dtype == "float16"} >= {1, len(images)}
    # Its other layout is not tried.
    assert [trial.problem for trial in plan.trials if trial.recipe.dtype == "bfloat16"] == [
        "not timed: a call takes 30.0 times as long"
    ]


def test_a_rewrite_that_gains_in_another_format_alone_is_found(
    extractor: DualGraphModule, images: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As convolutions of oneDNN with their channels last do, which add a bias at no cost."""

    def ratio_of(recipe: Recipe) -> float:
        if "fuse_conv_bn" in recipe.rewrites:
            return 0.7 if recipe.channels_last else 1.5
        return 0.8 if recipe.channels_last else 0.99

    def time_in_turn(functions: Sequence[Any], seconds: float, wait: Any) -> list[float]:
        return [1.0, *[ratio_of(function.args[0].recipe) for function in functions[1:]]]

    times_by(monkeypatch, 1.0)
    monkeypatch.setattr(search, "time_in_turn", time_in_turn)
    plan = featx.optimize(extractor, images, tolerance=1e-4, progress=False).plan
    assert plan is not None
    assert plan.recipe.channels_last
    assert "fuse_conv_bn" in plan.recipe.rewrites
    assert plan.chosen.ratio == 0.7


def test_the_table_has_the_last_times(
    extractor: DualGraphModule, images: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    ratios = iter([0.36, 0.64, *[0.64] * 100])
    times_by(monkeypatch, lambda: next(ratios))
    plan = featx.optimize(extractor, images, tolerance=0, progress=False).plan
    assert plan is not None
    assert plan.chosen.ratio == 0.64
    assert [trial.ratio for trial in plan.trials if trial.recipe == plan.chosen.recipe] == [0.64]


@pytest.mark.slow
def test_an_input_that_loses_more_counts(
    extractor: DualGraphModule, images: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    times_by(monkeypatch, 0.5)
    checks = {"large": images * 1e6}  # beyond float16
    optimized = featx.optimize(extractor, images, tolerance=5e-3, checks=checks, progress=False)
    assert optimized.plan is not None
    tried = {trial.recipe: trial for trial in optimized.plan.trials}
    halves = [trial for recipe, trial in tried.items() if recipe.dtype == "float16"]
    assert halves
    assert all(math.isinf(trial.error) and "above the tolerance" in trial.problem for trial in halves)
    assert optimized.recipe.dtype is None
    assert optimized.plan.inputs == ("the example", "noise", "photos of scikit-image", OTHER_FORM, "large")


def test_without_time_nothing_is_tried(extractor: DualGraphModule, images: torch.Tensor) -> None:
    plan = featx.optimize(extractor, images, budget=0, progress=False).plan
    assert plan is not None
    assert plan.recipe == Recipe()
    assert {trial.problem for trial in plan.trials} == {"not tried: the budget is used up"}


def test_what_cannot_run_is_noted(
    extractor: DualGraphModule, images: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    times_by(monkeypatch, 0.5)

    def fails(self: Any, *args: Any) -> Any:
        raise RuntimeError("no kernel for this format")

    monkeypatch.setattr("featx.optimization.module.OptimizedExtractor.forward", fails)
    plan = featx.optimize(extractor, images, progress=False).plan
    assert plan is not None
    assert plan.recipe == Recipe()
    assert "RuntimeError: no kernel for this format" in {trial.problem for trial in plan.trials}


def test_the_example_of_the_extractor_is_used(extractor: DualGraphModule) -> None:
    plan = featx.optimize(extractor, tolerance=0, progress=False).plan
    assert plan is not None
    assert plan.milliseconds > 0


def test_an_adaptive_extractor(model: nn.Module, images: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    times_by(monkeypatch, 0.5)
    extractor = featx.create_feature_extractor(model, ["block"], example_inputs=images, adaptive=True)
    optimized = featx.optimize(extractor, images, tolerance=5e-2, progress=False)
    assert optimized.plan is not None
    assert "further graphs" in optimized.plan.trials[0].problem
    assert optimized.recipe != Recipe()
    assert max(relative_errors(extractor(images), optimized(images)).values()) <= 5e-2


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_other_modules_are_refused(model: nn.Module, extractor: DualGraphModule, images: torch.Tensor) -> None:
    with pytest.raises(ArgumentTypeError, match="create_feature_extractor returns, got Small"):
        featx.optimize(model, images)
    optimized = featx.optimize(extractor, images, tolerance=0, progress=False)
    with pytest.raises(ArgumentTypeError, match="optimized already"):
        featx.optimize(optimized, images)


def test_train_mode_is_refused(extractor: DualGraphModule, images: torch.Tensor) -> None:
    with pytest.raises(OptimizationError, match=r"call eval\(\) first"):
        featx.optimize(extractor.train(), images)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "negative tolerance": ({"tolerance": -1}, "tolerance must be a number of at least 0, got -1"),
    "tolerance that is no number": ({"tolerance": float("nan")}, "at least 0, got nan"),
    "text as tolerance": ({"tolerance": "a"}, "tolerance must be a number of at least 0, got 'a'"),
    "tolerance of each feature": ({"tolerance": {"0": 1e-2}}, "tolerance must be a number"),
    "negative budget": ({"budget": -1}, "budget must be a number of at least 0, got -1"),
    "no budget": ({"budget": None}, "budget must be a number"),
    "checks without names": ({"checks": torch.rand(2)}, "checks must be inputs by name"),
    "number as plan": ({"plan": 5}, "plan must be a Plan or the path"),
    "no samples": ({"example_inputs": torch.rand(0, 3, 16, 16)}, "example_inputs have a tensor without elements"),
    "example of another form": ({"example_inputs": torch.rand(2, 2, 16, 16)}, "does not take example_inputs: Runtime"),
    "check of another form": ({"checks": {"mine": torch.rand(2, 2, 16, 16)}}, r"take checks\['mine'\]: Runtime"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_named(name: str, extractor: DualGraphModule, images: torch.Tensor) -> None:
    arguments, words = WRONG[name]
    with pytest.raises((ArgumentTypeError, OptimizationError), match=words):
        featx.optimize(extractor, **{"example_inputs": images, "progress": False, **arguments})


def test_inputs_without_values_are_refused(extractor: DualGraphModule, images: torch.Tensor) -> None:
    with pytest.raises(ArgumentTypeError, match="meta device"):
        featx.optimize(extractor, images.to("meta"))


def test_values_that_differ_from_call_to_call_are_refused(images: torch.Tensor) -> None:
    class Draws(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.rand_like(x)

    extractor = featx.create_feature_extractor(Draws(), ["add"], example_inputs=images).eval()
    with pytest.raises(OptimizationError, match="gives another 'add' for the same input"):
        featx.optimize(extractor, images)


# -- plans -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def planned(extractor: DualGraphModule, images: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> featx.Plan:
    times_by(monkeypatch, 0.5)
    plan = featx.optimize(extractor, images, tolerance=5e-2, progress=False).plan
    assert plan is not None
    return plan


@pytest.mark.slow
def test_a_plan_is_saved_and_applied(
    planned: featx.Plan, extractor: DualGraphModule, images: torch.Tensor, tmp_path: Path
) -> None:
    planned.save(tmp_path / "plan.json")
    assert featx.Plan.load(tmp_path / "plan.json") == planned
    again = featx.optimize(extractor, plan=tmp_path / "plan.json")
    assert again.recipe == planned.recipe
    assert max(relative_errors(extractor(images), again(images)).values()) <= planned.chosen.error
    assert {key: value.dtype for key, value in again(images).items()} == dict.fromkeys(planned.dtypes, torch.float32)


@pytest.mark.slow
def test_a_plan_with_a_larger_error_than_the_tolerance_is_refused(
    planned: featx.Plan, extractor: DualGraphModule
) -> None:
    plan = replace(planned, chosen=replace(planned.chosen, errors=dict.fromkeys(planned.dtypes, 1e-3)))
    with pytest.raises(OptimizationError, match=r"the tolerance is 1\.0e-06"):
        featx.optimize(extractor, plan=plan, tolerance=1e-6)
    assert featx.optimize(extractor, plan=plan, tolerance=1e-3).recipe == plan.recipe


def test_a_plan_that_is_not_there_is_named(extractor: DualGraphModule, tmp_path: Path) -> None:
    with pytest.raises(OptimizationError, match=r"nothing\.json.* cannot be read"):
        featx.optimize(extractor, plan=tmp_path / "nothing.json")


@pytest.mark.slow
def test_a_moved_extractor_takes_the_dtype_of_its_weights(
    planned: featx.Plan, extractor: DualGraphModule, images: torch.Tensor
) -> None:
    module = featx.optimize(extractor, plan=replace(planned, recipe=Recipe(dtype="bfloat16")))
    with pytest.warns(UserWarning, match="of another dtype now, which its plan has not measured"):
        module.float()
    with torch.no_grad():
        found, expected = module(images), extractor(images)
    assert max(relative_errors(expected, found).values()) <= 3e-2
    with pytest.warns(UserWarning, match="of another dtype now"):
        module.double()
    assert {value.dtype for value in module(images.double()).values()} == {torch.float32}


@pytest.mark.slow
def test_a_plan_for_other_hardware_is_refused(
    planned: featx.Plan, extractor: DualGraphModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "_processor", lambda: "Abacus 3000")
    with pytest.raises(OptimizationError, match=r"other hardware: name was .*, and is 'Abacus 3000'"):
        featx.optimize(extractor, plan=planned)


@pytest.mark.slow
def test_a_plan_for_another_extractor_is_refused(planned: featx.Plan, model: nn.Module, images: torch.Tensor) -> None:
    other = featx.create_feature_extractor(model, ["block"], example_inputs=images)
    with pytest.raises(OptimizationError, match="another extractor"):
        featx.optimize(other, plan=planned)


@pytest.mark.parametrize("change", [{"stride": 2}, {"eps": 1e-3}], ids=["stride", "eps"])
def test_a_plan_for_layers_with_other_options_is_refused(change: dict[str, Any]) -> None:
    def extractor(**options: Any) -> featx.GraphModule:
        torch.manual_seed(0)
        stride, eps = options.get("stride", 1), options.get("eps", 1e-5)
        layers = nn.Sequential(nn.Conv2d(3, 4, 1, stride), nn.BatchNorm2d(4, eps)).eval()
        return featx.create_feature_extractor(layers, ["1"], example_inputs=torch.rand(2, 3, 8, 8))

    plan = featx.optimize(extractor(), budget=0).plan
    assert plan is not None
    with pytest.raises(OptimizationError, match="another extractor"):
        featx.optimize(extractor(**change), plan=plan)


class Scaled(nn.Module):
    """What it computes depends on a function, a number that no text of it has, and a tensor that is no weight."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor], power: int, scale: float) -> None:
        super().__init__()
        self.function, self.power, self.scale = function, power, torch.tensor(scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x).pow(self.power) * self.scale


def scaled(function: Callable[..., torch.Tensor] = torch.sin, power: int = 2, scale: float = 3.0) -> nn.Module:
    return Scaled(function, power, scale)


def attending(heads: int = 2, first_weight: float = 0.0) -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, heads, 8, batch_first=True)
    nn.init.constant_(layer.linear1.weight, first_weight)
    return layer


@pytest.mark.parametrize(
    ("build", "change"),
    [
        (scaled, {"function": torch.cos}),
        (scaled, {"power": 3}),
        (scaled, {"scale": 4.0}),
        (attending, {"heads": 4}),
    ],
    ids=["function", "number", "tensor", "heads"],
)
def test_a_plan_for_modules_that_compute_something_else_is_refused(
    build: Callable[..., nn.Module], change: dict[str, Any]
) -> None:
    def extractor(**options: Any) -> nn.Module:
        model = nn.Sequential(build(**options)).eval()
        return featx.create_feature_extractor(model, ["0"], example_inputs=torch.rand(2, 3, 8))

    plan = featx.optimize(extractor(), budget=0).plan
    assert plan is not None
    assert featx.optimize(extractor(), plan=plan).plan is plan
    with pytest.raises(OptimizationError, match="another extractor"):
        featx.optimize(extractor(**change), plan=plan)


@pytest.mark.parametrize("build", [attending, lambda first_weight: nn.LSTM(8, 4)], ids=["attention", "LSTM"])
def test_a_plan_holds_for_other_weights(build: Callable[..., nn.Module]) -> None:
    def extractor(first_weight: float) -> nn.Module:
        model = nn.Sequential(build(first_weight=first_weight)).eval()
        return featx.create_feature_extractor(model, ["0"], example_inputs=torch.rand(2, 3, 8))

    plan = featx.optimize(extractor(0.0), budget=0).plan
    other = extractor(1.0)
    other(torch.rand(3, 3, 8))
    assert featx.optimize(other, plan=plan).plan is plan


@pytest.mark.slow
def test_addresses_of_objects_are_no_part_of_a_plan(images: torch.Tensor) -> None:
    class Layer(nn.Conv2d):
        def extra_repr(self) -> str:
            return f"hook={object()}"

    plans = [
        featx.optimize(
            featx.create_feature_extractor(nn.Sequential(Layer(3, 4, 1)).eval(), ["0"], example_inputs=images), budget=0
        ).plan
        for _ in range(2)
    ]
    assert plans[0].digest == plans[1].digest


def test_layers_in_train_mode_are_refused(extractor: DualGraphModule, images: torch.Tensor) -> None:
    norm = next(module for module in extractor.modules() if isinstance(module, nn.BatchNorm2d)).train()
    with pytest.raises(OptimizationError, match="is in train mode"):
        featx.optimize(extractor, images)
    assert norm.training


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"version": 2}', "null"])
def test_a_file_that_is_no_plan_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(OptimizationError, match="is no plan of"):
        featx.Plan.load(tmp_path / "plan.json")


@pytest.mark.slow
def test_a_plan_of_another_version_is_refused(planned: featx.Plan, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps({**planned.to_json(), "version": 99}))
    with pytest.raises(OptimizationError, match="version 99"):
        featx.Plan.load(tmp_path / "plan.json")


@pytest.mark.slow
def test_a_plan_is_a_table(planned: featx.Plan) -> None:
    text = str(planned)
    assert text.startswith(f"chosen: {planned.recipe}, 0.50 of the time")
    lines = text.splitlines()
    assert len(lines) == len(planned.trials) + 5
    assert any("the exact extractor" in line and "ms" in line for line in lines)


@pytest.mark.slow
def test_a_plan_is_drawn(planned: featx.Plan, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figure = planned.plot(tmp_path / "plan.png")
    assert (tmp_path / "plan.png").stat().st_size > 1000
    assert len(figure.axes) == 1


# -- measuring ---------------------------------------------------------------------------------------------------------


def test_errors_by_hand() -> None:
    one = torch.tensor([[3.0, 4.0], [1.0, 0.0]])
    other = torch.tensor([[3.0, 4.5], [1.0, 0.2]])
    assert relative_errors({"a": one}, {"a": other})["a"] == pytest.approx(0.2)  # the worst of 0.5 / 5 and 0.2 / 1
    assert relative_errors({"a": one}, {"a": one.clone()}) == {"a": 0.0}
    assert relative_errors({"a": (one, 3)}, {"a": (one, 3)}) == {"a": 0.0}
    holes = torch.tensor([4.0, float("inf"), -float("inf"), float("nan")])
    assert relative_errors({"a": holes}, {"a": holes + 1})["a"] == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.ones(2), torch.ones(3)),
        (torch.ones(2), torch.ones(2).double()),
        (torch.tensor([1, 2]), torch.tensor([1, 3])),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, float("nan")])),
        (torch.tensor([1.0, float("inf")]), torch.tensor([1.0, 2.0])),
        (torch.tensor([1.0, float("inf")]), torch.tensor([1.0, -float("inf")])),
        (torch.tensor([1.0, float("inf")]), torch.tensor([1.0, float("nan")])),
        (torch.zeros(2), torch.tensor([0.0, 1e-9])),
        (3, 4),
        ((torch.ones(1),), (torch.ones(1), torch.ones(1))),
    ],
)
def test_what_cannot_be_compared_has_an_infinite_error(one: Any, other: Any) -> None:
    assert math.isinf(relative_errors({"a": one}, {"a": other})["a"])


def test_a_missing_feature_has_an_infinite_error() -> None:
    assert math.isinf(relative_errors({"a": torch.ones(1)}, {})["a"])


def test_functions_are_timed_in_turn() -> None:
    calls: list[str] = []
    functions = [lambda: calls.append("one"), lambda: calls.append("two")]
    assert len(measure.time_in_turn(functions, 0.0, lambda: None)) == 2
    assert calls == ["one", "two"] * (len(calls) // 2)


def test_validation_inputs_have_the_forms_of_the_example() -> None:
    ids, maps = torch.arange(64)[None], torch.randn(2, 3, 8, 8)
    mask, segments = ids > 1, torch.ones(1, 64, dtype=torch.int64)
    found = validation_inputs(featx.examples.Example((ids, maps), {"mask": mask, "segments": segments}, "test"))
    assert list(found) == ["noise", "integers in another order", LONGER, "photos of scikit-image"]
    longer = found.pop(LONGER)
    for value, times in [(longer.args[0], 16), (longer.kwargs["mask"], 16), (longer.kwargs["segments"], 16)]:
        assert value.shape == (1, 64 * times)
    assert torch.equal(longer.args[0][:, ::16], ids)
    assert torch.equal(longer.args[1], maps)
    for name, example in found.items():
        is_of_integers = name == "integers in another order"
        assert torch.equal(example.args[0], ids) is not is_of_integers
        assert torch.equal(example.args[0].sort().values, ids)
        assert torch.equal(example.kwargs["mask"], mask)
        assert torch.equal(example.kwargs["segments"], segments)
        assert example.args[1].shape == maps.shape
        assert torch.equal(example.args[1], maps) is is_of_integers


def test_validation_inputs_that_the_extractor_refuses_are_left_out() -> None:
    class Positive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if (x < 0).any():
                raise ValueError("a negative number")
            return self.linear(x)

    extractor = featx.create_feature_extractor(Positive().eval(), ["linear"], example_inputs=torch.rand(64, 8))
    plan = featx.optimize(extractor, torch.rand(64, 8), progress=False, budget=0).plan
    assert plan is not None
    assert plan.inputs == ("the example", OTHER_FORM)


class Positions(nn.Module):
    """Adds waves of the positions of tokens, of which half precision has no digits far after the example."""

    def __init__(self, *, persistent: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 8)
        self.register_buffer("frequencies", 1 / 10 ** torch.linspace(0, 2, 8), persistent=persistent)
        self.linear = nn.Linear(8, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        angles = torch.arange(ids.shape[1])[:, None] * self.get_buffer("frequencies").float()
        words = self.words(ids)
        return self.linear(words + angles.sin().to(words.dtype))


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [True, False])
def test_errors_of_longer_texts_count(persistent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    times_by(monkeypatch, 0.5)
    ids = torch.randint(0, 50, (2, 40))
    extractor = featx.create_feature_extractor(Positions(persistent=persistent), ["linear"], example_inputs=ids).eval()
    fast = featx.optimize(extractor, ids, tolerance=3e-2, progress=False)
    assert fast.plan is not None
    assert LONGER in fast.plan.inputs
    errors = {trial.recipe.dtype: trial.error for trial in fast.plan.trials if trial.recipe.compile is None}
    # The table itself stays as it is where it is no part of the state.
    assert (errors["bfloat16"] > 5e-2) is persistent
    longer = torch.randint(0, 50, (1, 600))
    assert max(relative_errors(extractor(longer), fast(longer)).values()) < 3e-2


def test_images_without_photos(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("featx.optimization.inputs.importlib.util.find_spec", lambda name: None)
    found = validation_inputs(featx.examples.Example((torch.randn(5, 3, 32, 32),), {}, "test"))
    image = found["images with the spectrum of photos"].args[0]
    assert image.shape == (5, 3, 32, 32)
    assert len({tuple(each.flatten().tolist()) for each in image}) == 5
    # Neighbours are alike, as they are in photos and not in noise.
    assert (image[..., 1:] - image[..., :-1]).abs().mean() < 0.5 * image.std()


@pytest.mark.slow
def test_progress_is_shown(
    extractor: DualGraphModule, images: torch.Tensor, capsys: pytest.CaptureFixture[str]
) -> None:
    featx.optimize(extractor, images, tolerance=0)
    assert "trying remove_dropout, remove_identity" in capsys.readouterr().err
