"""The transformations under examples/transforms do what they say, on models other than those that they show."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn

import featx
from featx.passes import split_at

FOLDER = Path(__file__).parents[2] / "examples" / "transforms"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))


def load(name: str) -> Any:
    specification = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", NAMES)
def test_example_runs_and_prints(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    load(name).main()
    assert capsys.readouterr().out.strip()


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.two(self.act(self.one(x)))) + torch.relu(x)


def test_relu_is_replaced_however_it_is_spelled() -> None:
    model, x = Mixed(), torch.randn(3, 6)
    gm = featx.trace(model, x)
    assert load("replace_op").replace_relu(gm) == 3
    expected = F.gelu(model.two(F.gelu(model.one(x)))) + F.gelu(x)
    assert torch.equal(gm(x), expected)


def test_decomposition_keeps_the_values_and_the_module() -> None:
    example, model, x = load("decompose"), Mixed(), torch.randn(3, 6)
    gm = featx.symbolic_trace(model)
    decomposed = example.decompose(gm)
    assert not decomposed.graph.find_nodes(op="call_function", target=F.relu)
    assert gm.graph.find_nodes(op="call_function", target=F.relu)
    torch.testing.assert_close(decomposed(x), model(x))


def test_fused_model_shares_nothing_that_changed() -> None:
    torch.manual_seed(0)
    shared = nn.Conv2d(3, 3, 1)
    model = nn.Sequential(nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3), shared, nn.BatchNorm2d(3), shared).eval()
    for module in model:
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.weight)
            module.running_mean = torch.randn(3)
    image = torch.randn(2, 3, 8, 8)
    expected = model(image)
    gm = featx.trace(model, image)
    assert load("fuse_conv_bn").fuse(gm) == 1  # the second convolution is called twice
    torch.testing.assert_close(gm(image), expected)
    assert torch.equal(model(image), expected)


def test_inverse_undoes_a_function_and_refuses_what_it_cannot() -> None:
    example = load("invert")
    x = torch.linspace(-2, 2, 9, dtype=torch.float64)

    def function(x: Tensor) -> Tensor:
        return torch.sigmoid(x * 3 - 1) + 4

    torch.testing.assert_close(example.invert(featx.symbolic_trace(function))(function(x)), x)
    with pytest.raises(ValueError, match="'sin' has no inverse"):
        example.invert(featx.symbolic_trace(lambda x: torch.sin(x)))
    with pytest.raises(ValueError, match="alone and first"):
        example.invert(featx.symbolic_trace(lambda x: x + x))


def test_inlined_function_is_gone_and_the_values_are_the_same() -> None:
    example = load("inline_function")
    gm = featx.symbolic_trace(lambda x: example.scaled(x, 3.0) - example.scaled(x, 0.5))
    x = torch.randn(5)
    expected = gm(x)
    calls = gm.graph.find_nodes(op="call_function", target=example.scaled)
    assert example.inline(gm, example.scaled) == len(calls)
    assert torch.equal(gm(x), expected)


def test_own_tracer_keeps_blocks_whole_and_notes_them() -> None:
    example = load("own_tracer")
    model = nn.Sequential(example.Residual(4), nn.ReLU())
    graph = example.BlockTracer((example.Residual,)).trace(model)
    assert [node.target for node in graph.find_nodes(op="call_module")] == ["0", "1"]
    opened = example.BlockTracer(()).trace(model)
    assert [node.meta["block"] for node in opened.find_nodes(op="call_module")] == ["0.layers.0", "0.layers.1", "1"]


def test_first_node_that_is_not_finite_is_named() -> None:
    example = load("find_nan")
    model = nn.Sequential(nn.Identity(), example.Logarithm())
    interpreter = example.FiniteInterpreter(featx.trace(model, torch.ones(2)))
    assert torch.equal(interpreter.run(torch.ones(2)), torch.ones(2))
    with pytest.raises(example.NotFinite, match=r"1 of 2 values of '1\.log'"):
        interpreter.run(torch.tensor([1.0, -1.0]))


def test_profile_has_a_time_for_each_node_and_run() -> None:
    example = load("profile_nodes")
    gm = featx.trace(Mixed(), torch.randn(3, 6))
    interpreter = example.ProfilingInterpreter(gm)
    for _ in range(3):
        interpreter.run(torch.randn(3, 6))
    assert {node: len(times) for node, times in interpreter.seconds.items()} == dict.fromkeys(gm.graph.nodes, 3)
    assert len(interpreter.table(2).splitlines()) == 2


def test_each_returned_value_is_wrapped() -> None:
    gm = featx.symbolic_trace(lambda x: {"sum": x + 1, "both": (x, 2)})
    load("wrap_output").wrap_output(gm, torch.neg)
    x = torch.randn(3)
    result = gm(x)
    assert torch.equal(result["sum"], -(x + 1))
    assert torch.equal(result["both"][0], -x)
    assert result["both"][1] == 2


def test_patched_activation_reaches_all_that_follow_and_not_the_model() -> None:
    example, model, x = load("patch_activations"), Mixed(), torch.randn(3, 6)
    gm = featx.trace(model, x)
    before = gm.code
    result = example.patched(gm, {"act": lambda value: value * 2, "one": torch.neg})(x)
    expected = F.relu(model.two(model.act(-model.one(x)) * 2)) + torch.relu(x)
    assert torch.equal(result, expected)
    assert gm.code == before
    with pytest.raises(featx.NodeNameError):
        example.patched(gm, {"three": torch.neg})


@pytest.mark.slow
def test_stages_of_a_pipeline_are_balanced_and_give_what_the_model_gives() -> None:
    torchvision = pytest.importorskip("torchvision")
    example = load("split_pipeline")
    torch.manual_seed(0)
    model = torchvision.models.resnet18(weights=None).eval()
    images = torch.randn(1, 3, 64, 64)
    gm = featx.trace(model, images)
    cuts = example.balanced_cuts(gm, images, 3)
    assert len(cuts) == 2
    stages = list(split_at(gm, cuts).children())
    costs = [
        featx.cost(stage, *inputs).total.flops for stage, inputs in zip(stages, inputs_of(stages, images), strict=True)
    ]
    assert max(costs) < 0.5 * sum(costs)
    batches = [torch.randn(1, 3, 64, 64) for _ in range(4)]
    results = list(example.run_pipeline(stages, batches))
    assert all(torch.equal(result, model(batch)) for result, batch in zip(results, batches, strict=True))


def inputs_of(stages: list[Any], images: Tensor) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = []
    value: Any = images
    for stage in stages:
        found.append((value,))
        value = stage(value)
    return found
