"""profile: what is measured, how it is summed, and that the model stays as it was; with a clock of the tests."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import featx
from featx.passes import profile as profile_module_function


class Clock:
    """Stands still unless something is waited for."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    # The function `featx.passes.profile` hides the module of that name.
    monkeypatch.setattr(importlib.import_module("featx.passes.profile"), "time", clock)
    return clock


class Takes(nn.Module):
    """Takes as long as the next of `seconds` says."""

    def __init__(self, clock: Clock, seconds: Iterator[float]) -> None:
        super().__init__()
        self.clock, self.seconds = clock, seconds

    def forward(self, x: torch.Tensor):
        self.clock.now += next(self.seconds)
        return x + 1


class Leaves(featx.Tracer):
    def is_leaf_module(self, m: Any, module_qualified_name: Any):
        return isinstance(m, Takes) or super().is_leaf_module(m, module_qualified_name)


def forever(*values: float) -> Iterator[float]:
    while True:
        yield from values


def traced(model: nn.Module) -> featx.GraphModule:
    return featx.GraphModule(model, Leaves().trace(model), "Sequential")


def test_public_name_is_the_function() -> None:
    assert featx.profile is profile_module_function


def test_times_are_medians_and_add_up_for_modules(clock: Clock) -> None:
    # Each module runs once while writes are watched, then in turn alone (measured) and in a call of the whole.
    first = Takes(clock, iter([9.0, 1.0, 9.0, 5.0, 9.0, 3.0, 9.0]))
    second = Takes(clock, forever(6.0))
    third = Takes(clock, forever(1.0))
    module = traced(nn.Sequential(first, nn.Sequential(second, third)))
    report = featx.profile(module, torch.rand(3), repeats=3, warmup=0)
    times = {node.name: (node.path, node.seconds, node.fastest, node.slowest, node.share) for node in report.nodes}
    assert times == {
        "_0": ("0", 3.0, 1.0, 5.0, 0.3),
        "_1_0": ("1.0", 6.0, 6.0, 6.0, 0.6),
        "_1_1": ("1.1", 1.0, 1.0, 1.0, 0.1),
    }
    assert [(row.path, row.kind, row.nodes, row.seconds, row.share) for row in report.modules] == [
        ("", "Sequential", 3, 10.0, 1.0),
        ("0", "Takes", 1, 3.0, 0.3),
        ("1", "Sequential", 2, 7.0, 0.7),
        ("1.0", "Takes", 1, 6.0, 0.6),
        ("1.1", "Takes", 1, 1.0, 0.1),
    ]
    assert (report.seconds, report.call_seconds, report.repeats) == (10.0, 16.0, 3)


def test_warm_up_is_not_measured(clock: Clock) -> None:
    module = traced(nn.Sequential(Takes(clock, iter([100.0, 50.0, 50.0, 2.0, 3.0]))))
    report = featx.profile(module, torch.rand(3), repeats=1, warmup=2)
    assert (report.seconds, report.call_seconds) == (2.0, 3.0)


def test_tables(clock: Clock) -> None:
    module = traced(nn.Sequential(Takes(clock, forever(0.001)), nn.Sequential(Takes(clock, forever(0.003)))))
    assert str(featx.profile(module, torch.rand(3), repeats=2)).splitlines() == [
        "node  target  median  fastest  slowest   share   so far",
        "----  ------  ------  -------  -------  ------  -------",
        "1.0   1.0       3 ms     3 ms     3 ms  75.0 %   75.0 %",
        "0     0         1 ms     1 ms     1 ms  25.0 %  100.0 %",
        "",
        "module      class       nodes  time    share",
        "----------  ----------  -----  ----  -------",
        "Sequential  Sequential      2  4 ms  100.0 %",
        "  0         Takes           1  1 ms   25.0 %",
        "  1         Sequential      1  3 ms   75.0 %",
        "",
        "2 nodes take 4 ms, a call of the whole 4 ms (medians of 2)",
    ]


def test_each_run_sees_the_inputs_and_the_state_as_they_were() -> None:
    seen: list[Any] = []

    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))
            self.count = 0

        def forward(self, x: torch.Tensor):
            seen.append((x.tolist(), self.calls.item()))
            self.calls.add_(1)
            self.count += 1
            return x.add_(1)

    class Whole(featx.Tracer):
        def is_leaf_module(self, m: Any, module_qualified_name: Any):
            return True

    model = nn.Sequential(Writes())
    module = featx.GraphModule(model, Whole().trace(model))
    value = torch.zeros(2)
    featx.profile(module, value, repeats=2, warmup=1)
    assert seen == [([0.0, 0.0], 0.0)] * 6
    assert value.tolist() == [0.0, 0.0]
    assert (model[0].calls.item(), model[0].count) == (0.0, 0)


def test_model_in_train_mode_stays_as_it_was() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout()).train()
    state, generator = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    value = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    report = featx.profile(featx.symbolic_trace(model), value, repeats=1, warmup=0)
    assert [node.name for node in report.nodes] == ["_0", "_1", "_2"]
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generator)


def test_state_is_put_back_after_an_error_too() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(5, 5)).train()
    with pytest.raises(RuntimeError):
        featx.profile(featx.symbolic_trace(model), torch.rand(3, 4))
    assert model[0].num_batches_tracked == 0


def test_errors() -> None:
    module = featx.symbolic_trace(nn.Linear(3, 4))
    with pytest.raises(featx.InputError, match="meta device"):
        featx.profile(module, torch.empty(2, 3, device="meta"))
    with pytest.raises(featx.ArgumentTypeError, match="repeats must be at least 1"):
        featx.profile(module, torch.rand(2, 3), repeats=0)
    with pytest.raises(featx.ArgumentTypeError, match="no featx graph"):
        featx.profile(torch.fx.symbolic_trace(nn.Linear(3, 4)), torch.rand(2, 3))
    with pytest.raises(featx.InputError, match="takes the inputs"):
        featx.profile(module)
