"""Buffers, statistics, generators, inputs and torch itself: as before after a trace, and written by a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from agreement import agree, image, same
from torch import nn
from torch.nn import functional

import featx

Snapshot = Callable[[nn.Module], Any]


class Normalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.norm(x))


def test_running_statistics_stay_in_a_trace_and_move_in_a_run(snapshot: Snapshot) -> None:
    model = Normalized().train()
    before = snapshot(model)
    traced = featx.trace(model, image(5))
    before.check()
    traced(image(5))
    assert model.norm.num_batches_tracked == 1
    assert not torch.equal(model.norm.running_mean, torch.zeros(4))


class NormalizedByValue(Normalized):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        return self.drop(x) * (2.0 if bool((x > -100).all()) else 3.0)


def test_running_statistics_and_generators_are_put_back_after_a_trace_for_real(snapshot: Snapshot) -> None:
    model = NormalizedByValue().train()
    before = snapshot(model)
    featx.trace(model, image(5))
    before.check()
    agree(model.eval(), (image(),), (image(9),))


class Failing(NormalizedByValue):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = x
        self.count = 3
        x = super().forward(x)
        raise ValueError("no further")


def test_model_is_as_before_after_a_trace_that_fails(snapshot: Snapshot) -> None:
    model = Failing().train()
    before = snapshot(model)
    with pytest.raises((ValueError, featx.TraceError)):
        featx.trace(model, image(5))
    before.check()


class WritesState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        return x * self.weight * self.steps


def test_counter_is_left_alone_by_the_trace_and_counts_in_the_graph(snapshot: Snapshot) -> None:
    model, twin = WritesState(), WritesState()
    before = snapshot(model)
    traced = featx.trace(model, image())
    before.check()
    assert all(same(traced(image()), twin(image())) for _ in range(3))
    assert model.steps == 3


class Adding(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x += 1
        x[:, 0] = 0
        return x * 2


def test_input_of_the_caller_is_unchanged_by_a_trace_and_written_by_a_run() -> None:
    x = image()
    traced = featx.trace(Adding(), x)
    assert torch.equal(x, image())
    one, other = image(), image()
    assert same(traced(one), Adding()(other))
    assert torch.equal(one, other)
    assert not torch.equal(one, image())


def test_functions_of_torch_are_as_before_after_a_trace() -> None:
    before = torch.relu, functional.relu, nn.Module.__call__, torch.is_grad_enabled, len
    featx.trace(WritesState(), image())
    assert before == (torch.relu, functional.relu, nn.Module.__call__, torch.is_grad_enabled, len)
