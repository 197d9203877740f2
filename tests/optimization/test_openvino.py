"""Extractors that OpenVINO computes, against the extractors themselves."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import featx
from featx.examples import as_example
from featx.features.dual import DualGraphModule
from featx.optimization import openvino_runner, search
from featx.optimization.build import Builder
from featx.optimization.measure import relative_errors
from featx.optimization.module import OptimizedExtractor, dtypes_of, named
from featx.optimization.openvino_runner import OpenVINORunner
from featx.optimization.recipe import OPENVINO, Recipe

pytestmark = pytest.mark.slow


def optimized_by(recipe: Recipe, extractor: DualGraphModule, inputs: Any) -> OptimizedExtractor:
    example = as_example(inputs)
    dtypes = dtypes_of(named(extractor(*example.args, **example.kwargs)))
    return Builder(extractor, example, dtypes).build(recipe)


def error_of(found: Any, expected: Any) -> float:
    return max(relative_errors({key: value.detach() for key, value in expected.items()}, found).values())


def test_values_are_those_of_the_extractor(extractor: DualGraphModule, images: torch.Tensor) -> None:
    optimized = optimized_by(Recipe(rewrites=("fuse_conv_bn",), compile=OPENVINO), extractor, images)
    kept: list[tuple[Any, Any]] = []
    for batch in (
        images,
        torch.randn_like(images),
        torch.randn(5, 3, 16, 16),
        images.transpose(2, 3),
        images[:, :, ::2],
    ):
        found, expected = optimized(batch), extractor(batch)
        assert list(found) == list(expected)
        assert 0 < error_of(found, expected) < 1e-5
        kept.append((found, expected))
    assert optimized.problem == ""
    for found, expected in kept:  # no call has written into the result of another one
        assert error_of(found, expected) < 1e-5


class Pair(NamedTuple):
    features: torch.Tensor
    lengths: torch.Tensor
    name: str


class OfTokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.linear = nn.Embedding(11, 8), nn.Linear(8, 8)

    def forward(self, ids: torch.Tensor, scale: float = 1.0, mask: torch.Tensor | None = None) -> dict[str, Any]:
        features = self.linear(self.embedding(ids % 11)) * scale
        if mask is not None:
            features = features * mask[..., None]
        return {"pair": Pair(features, (ids > 3).sum(1), "tokens"), "nothing": None}


def test_nested_inputs_and_results() -> None:
    model = OfTokens().eval()
    runner = OpenVINORunner(model)
    ids = torch.randint(0, 11, (2, 5))
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]).bool()
    with torch.no_grad():
        for args, kwargs in (((ids,), {}), ((ids,), {"scale": 2.0}), ((ids, 3.0), {"mask": mask}), ((ids[:, :3],), {})):
            expected, found = model(*args, **kwargs), runner(*args, **kwargs)
            assert type(found["pair"]) is Pair
            assert (found["pair"].name, found["nothing"]) == ("tokens", None)
            torch.testing.assert_close(found["pair"].features, expected["pair"].features)
            assert found["pair"].lengths.dtype is torch.int64
            assert torch.equal(found["pair"].lengths, expected["pair"].lengths)
    assert runner.problem == ""


def test_what_openvino_would_take_for_something_else_goes_to_the_extractor() -> None:
    model = OfTokens().eval()
    runner = OpenVINORunner(model)
    ids = torch.randint(0, 11, (2, 5))
    with torch.no_grad():
        runner(ids)
        # PyTorch looks these up, and the floats behind it are OpenVINO's, whose kernels may round otherwise.
        for large in (ids + 11 * 2**40, torch.full((2, 5), torch.iinfo(torch.int64).min)):
            torch.testing.assert_close(runner(large)["pair"].features, model(large)["pair"].features)
        assert runner(ids[:, :0])["pair"].features.shape == (2, 0, 8)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(runner(ids)["pair"].features, model(ids)["pair"].features)
        model.double()
        runner = OpenVINORunner(model)
        assert torch.equal(runner(ids)["pair"].features, model(ids)["pair"].features)
        assert "floats" in runner.problem


class ComputesIntegers(nn.Module):
    def __init__(self, compute: Callable[[torch.Tensor], torch.Tensor], layer: nn.Module) -> None:
        super().__init__()
        self.table, self.compute, self.layer = nn.Embedding(100, 8), compute, layer

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.layer(self.table(self.compute(ids)))


@pytest.mark.parametrize(
    "compute",
    [
        lambda ids: ids,
        lambda ids: (ids * 31337) % 100,
        lambda ids: (ids - 3) // 2 + 10,
        lambda ids: ids.cumsum(1).clamp(max=99),
        lambda ids: (ids.float() * 1e10).long() % 100,
        lambda ids: torch.arange(100).flip(0)[ids],
        lambda ids: torch.arange(900.0).sin().view(9, 100)[:, ids[0]].argmax(0)[None],
        lambda ids: (ids + 2**40).clone().sub_(2**40),
        lambda ids: torch.stack(ids.float().topk(3, 1)[1].split(1, 1)[1:]),
    ],
    ids=["none", "product", "quotient", "sum", "cast", "lookup", "argmax", "in place", "of several results"],
)
def test_integers_are_computed_by_torch(compute: Callable[[torch.Tensor], torch.Tensor]) -> None:
    model = ComputesIntegers(compute, nn.Linear(8, 8)).eval()
    calls: list[nn.Module] = []
    runner = OpenVINORunner(model)
    with torch.no_grad():
        all_ids = torch.arange(10).reshape(2, 5), torch.arange(10).reshape(2, 5) + 60
        runner(all_ids[0])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(model, "forward", lambda *_: calls.append(model))
            found = [runner(ids) for ids in all_ids]
        for ids, value in zip(all_ids, found, strict=True):
            torch.testing.assert_close(value, model(ids))
    assert (runner.problem, calls) == ("", [])


def test_what_is_computed_with_integers_alone_goes_to_the_extractor() -> None:
    model = ComputesIntegers(lambda ids: ids, nn.Identity()).eval()
    runner = OpenVINORunner(model)
    ids = torch.arange(10).reshape(2, 5)
    with torch.no_grad():
        assert torch.equal(runner(ids), model(ids))
    assert runner.problem == "OpenVINO: OptimizationError: all values are computed with integers"


class Mixes(nn.Module):
    """Integers come after what is computed from an image, and an input and a weight are returned."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.table, self.last = nn.Linear(6, 16), nn.Embedding(8, 8), nn.Linear(8, 3)
        self.register_buffer("order", torch.arange(4).flip(0))

    def forward(self, x: torch.Tensor, ids: torch.Tensor, unused: torch.Tensor) -> list[torch.Tensor]:
        tokens, scores = torch.relu_(self.embed(x))[:, self.order].chunk(2, -1)
        chosen = scores.argmax(-1)
        features = self.last(tokens + self.table(chosen) * ids.sum())
        return [features, chosen, x, self.last.weight, features]


def test_parts_hand_over_what_the_other_one_needs() -> None:
    model = Mixes().eval()
    runner = OpenVINORunner(model)
    with torch.no_grad():
        for _ in range(3):
            inputs = torch.randn(2, 4, 6), torch.randint(0, 2, (3,)), torch.rand(1)
            found, expected = runner(*inputs), model(*inputs)
            torch.testing.assert_close(found, expected)
            assert torch.equal(found[1], expected[1])
            assert found[2] is inputs[0]
            assert found[0] is found[4]
    assert runner.problem == ""


def test_ids_that_no_table_has_raise_as_the_model_does() -> None:
    model = ComputesIntegers(lambda ids: ids.flatten(1), nn.Linear(8, 8)).eval()
    runner = OpenVINORunner(model)
    ids = torch.arange(10).reshape(2, 5)
    with torch.no_grad():
        torch.testing.assert_close(runner(ids), model(ids))
        assert runner.problem == ""
        for others in (ids + 95, ids - 1):
            with pytest.raises(IndexError):
                runner(others)


class ComparesInputs(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * 3 if x is y else x + y


def test_one_tensor_for_two_inputs_goes_to_the_extractor() -> None:
    model, x, y = ComparesInputs(), torch.rand(3), torch.rand(3)
    runner = OpenVINORunner(model)
    for inputs in ((x, y), (x, x), (y, x)):
        torch.testing.assert_close(runner(*inputs), model(*inputs))
    assert runner.problem == ""


class Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * 2 + self.calls


class Decides(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum() > 0 else x * 3


class ReturnsNumber(nn.Module):
    def forward(self, x: torch.Tensor) -> list[Any]:
        return [x * 2, torch.tensor(int(x.sum().item()))]


@pytest.mark.parametrize("make", [Writes, Decides, ReturnsNumber])
def test_what_cannot_be_exported_goes_to_the_extractor(make: Callable[[], nn.Module]) -> None:
    model, eager = make(), make()
    runner = OpenVINORunner(model)
    for x in (torch.ones(3), -torch.ones(3)):
        expected, found = eager(x), runner(x)
        assert all(map(torch.equal, (*expected,), (*found,)))
    assert runner.problem.startswith("OpenVINO: ")


def test_inference_mode_and_threads(extractor: DualGraphModule, images: torch.Tensor) -> None:
    optimized = optimized_by(Recipe(compile=OPENVINO), extractor, images)
    with torch.inference_mode():
        assert error_of(optimized(images * 1), extractor(images)) < 1e-5
    batches = [torch.randn_like(images) for _ in range(24)]
    with ThreadPoolExecutor(4) as pool:
        for batch, found in zip(batches, pool.map(optimized, batches), strict=True):
            assert error_of(found, extractor(batch)) < 1e-5
    assert optimized.problem == ""


def test_weights_that_change(extractor: DualGraphModule, images: torch.Tensor) -> None:
    optimized = optimized_by(Recipe(compile=OPENVINO), extractor, images)
    before = optimized(images)
    again = pickle.loads(pickle.dumps(optimized))
    assert all(torch.equal(again(images)[key], value) for key, value in before.items())
    halved = {name: value / 2 if value.is_floating_point() else value for name, value in optimized.state_dict().items()}
    nn.ModuleList([optimized]).load_state_dict({f"0.{name}": value for name, value in halved.items()})
    expected = optimized_by(Recipe(), extractor, images)
    expected.load_state_dict(halved)
    assert error_of(optimized(images), expected(images)) < 1e-5
    assert error_of(optimized(images), before) > 1e-2


def test_it_is_tried_and_its_plan_is_for_one_version(
    extractor: DualGraphModule, images: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def time_in_turn(functions: list[Any], seconds: float, wait: Any) -> list[float]:
        return [0.1 if getattr(each.args[0], "recipe", Recipe()).compile == OPENVINO else 1.0 for each in functions]

    monkeypatch.setattr(search, "time_in_turn", time_in_turn)
    monkeypatch.setattr(search.Search, "_try_compiled", lambda self: None)
    monkeypatch.setattr(search, "_SECONDS_TO_COMPILE", 0.0)
    module = featx.optimize(extractor, images, tolerance=1e-5, progress=False)
    plan = module.plan
    assert plan is not None
    assert plan.recipe.compile == OPENVINO
    assert "OpenVINO" in str(plan)
    assert error_of(module(images), extractor(images)) < 1e-5
    same = featx.optimize(extractor, plan=plan)
    assert all(torch.equal(same(images)[key], value) for key, value in module(images).items())
    plan.hardware["openvino"] = "2019.1"
    with pytest.raises(featx.OptimizationError, match=r"openvino was '2019\.1'"):
        featx.optimize(extractor, plan=plan)
    monkeypatch.setattr(openvino_runner, "is_available", lambda: False)
    with pytest.raises(featx.MissingExtraError, match=r'pip install "featx\[openvino\]"'):
        featx.optimize(extractor, plan=plan)
    others = featx.optimize(extractor, images, tolerance=1e-5, budget=20, progress=False).plan
    assert others is not None
    assert all(trial.recipe.compile != OPENVINO for trial in others.trials)


def test_the_plan_says_why_it_was_not_taken(images: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(x * 2 if x.sum() < 1e6 else x * 3)

    monkeypatch.setattr(search.Search, "_try_compiled", lambda self: None)
    monkeypatch.setattr(search, "_SECONDS_TO_COMPILE", 0.0)
    extractor = featx.create_feature_extractor(Model(), ["output"], example_inputs=images).eval()
    plan = featx.optimize(extractor, images, progress=False, budget=20).plan
    assert plan is not None
    found = [trial for trial in plan.trials if trial.recipe.compile == OPENVINO]
    assert found[0].problem.startswith("OpenVINO: ")
    assert plan.recipe.compile is None
