"""StandIns: a trace on them allocates no memory, whatever the model weighs, and computes nothing."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import featx


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(width, width), nn.BatchNorm1d(width)
        self.scale = nn.Parameter(torch.ones(width, width))
        self.register_buffer("state", torch.zeros(width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.state += 1
        y = torch.relu(self.norm(self.first(x))) @ (self.scale * 2)
        return x + y.softmax(-1) + self.state.mean()


def model_of(width: int) -> nn.Module:
    linear = nn.utils.parametrizations.weight_norm(nn.Linear(width, width))
    return nn.Sequential(Residual(width), linear, nn.ReLU(inplace=True), nn.Dropout(), Residual(width))


def peak(call: Callable[[], Any]) -> int:
    """Return the most bytes of tensors that `call` has allocated at any time, on the CPU."""
    gc.collect()  # what others leave to be freed meanwhile would count
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    held = [0]
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held.append(held[-1] + event.nbytes())
    return max(held)


USES: dict[str, Callable[[nn.Module, torch.Tensor], Any]] = {
    "trace": featx.trace,
    "names": lambda model, x: featx.get_graph_node_names(model, example_inputs=x),
    "extractor": lambda model, x: featx.create_feature_extractor(model, ["4.softmax"], example_inputs=x),
}


@pytest.mark.slow
@pytest.mark.usefixtures("undisturbed")  # each run remembers a state of the generator
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", USES)
def test_trace_on_stand_ins_allocates_nothing_whatever_the_weights(name: str, training: bool) -> None:
    for width in (8, 256):
        model, x = model_of(width).train(training), torch.rand(2, width)
        # A trace remembers some states of torch's generator, 5 KB each.
        states = 4 * torch.get_rng_state().nbytes
        assert peak(lambda model=model, x=x: USES[name](model, x)) < states + 1024
        # The measure sees what is allocated.
        assert peak(lambda model=model, x=x: model(x)) > 4 * width**2
        assert (
            peak(lambda model=model: copy.deepcopy(model)) > 4 * 4 * width**2
        )  # of five; what others free meanwhile counts too


def test_model_without_values_is_traced_and_computes_when_it_has_some() -> None:
    with torch.device("meta"):
        model = model_of(1 << 16)  # of 100 GB
    graph = featx.trace(model.eval(), torch.empty(2, 1 << 16, device="meta")).graph
    names = [node.name for node in featx.trace(model_of(8).eval(), torch.rand(2, 8)).graph.nodes]
    assert [node.name for node in graph.nodes if not node.name.startswith("check")] == [
        name for name in names if not name.startswith("check")
    ]


class FillsWithStride(nn.Module):
    """Fills tensors of the size of its input with numbers that it holds as a tensor, as the heads of YOLO do."""

    def __init__(self, fill: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.conv, self.fill = nn.Conv2d(3, 4, 3), fill
        self.register_buffer("strides", torch.tensor([8.0, 16.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        return y.flatten(2) * self.fill(y, self.strides[1])


FILLING: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "full": lambda y, stride: torch.full((y.shape[2] * y.shape[3],), stride),
    "full by name": lambda y, stride: torch.full(fill_value=stride, size=(y.shape[2] * y.shape[3],), dtype=y.dtype),
    "full of integers": lambda y, stride: torch.full((y.shape[2] * y.shape[3],), stride.long()),
    "full_like": lambda y, stride: torch.full_like(y.flatten(2), stride),
    "new_full": lambda y, stride: y.new_full((y.shape[2] * y.shape[3],), stride),
}


@pytest.mark.parametrize("kind", FILLING)
def test_a_number_that_fills_a_tensor_needs_no_run_for_real(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    model = FillsWithStride(FILLING[kind]).eval()
    with caplog.at_level("DEBUG", "featx"):
        extractor = featx.create_feature_extractor(model, ["output"], example_inputs=torch.rand(2, 3, 8, 9))
    assert "without values" in caplog.text
    assert "with values" not in caplog.text.replace("0 with values", "")
    for shape in ((2, 3, 8, 9), (1, 3, 11, 7)):
        x = torch.rand(shape)
        found, expected = extractor(x)["output"], model(x)
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
