"""A module that cannot be looked into after all: what was recorded in it is taken back."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

import featx
from featx.tracing.calls.value_log import ValueLog
from featx.tracing.history.noted_set import NotedSet
from featx.tracing.signals import NeedsRealValues
from featx.tracing.stand_ins.dynamic_shapes import DynamicShapes

X = torch.ones(2, 4)


class GivesNumber(nn.Module):
    """It gives a number that depends on values, and cannot be looked into."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        random.random()
        return x, int(x.sum().item()) % 2


class TakesLayer(nn.Module):
    def __init__(self, draws: bool) -> None:
        super().__init__()
        self.number = GivesNumber()
        self.layers = nn.ModuleList([nn.ReLU(), nn.Tanh()])
        self.draws = draws

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, place = self.number(x)
        x = self.layers[place](x)
        if self.draws:
            random.random()
        return x


def test_numbers_of_a_module_that_is_kept_whole_in_the_end_are_forgotten() -> None:
    model = nn.Sequential(TakesLayer(draws=True), TakesLayer(draws=False)).eval()
    traced = featx.trace(model, X)
    called = [str(node.target) for node in traced.graph.nodes if node.op == "call_module"]
    assert called == ["0", "1.number", "1.layers.0"]
    assert torch.equal(traced(X), model(X))
    with pytest.raises(featx.SpecializationError, match="a number that the model reads from tensor values"):
        traced(torch.tensor([[9.0, 0.5, 0.0, 0.0]]))


def test_a_noted_set_forgets_what_was_added_last() -> None:
    noted = NotedSet[int]()
    noted.add(1)
    mark = noted.mark()
    noted.update((1, 2), (3,))
    assert noted == {1, 2, 3}
    noted.forget(mark)
    assert noted == {1}
    noted.add(2)
    assert noted == {1, 2}
    assert noted.mark() == 2


def test_values_that_were_read_since_are_read_again() -> None:
    log = ValueLog()
    log.expect([("item", 1), ("item", 2)])
    assert log.next("item") == 1
    log.note("item", 1)
    mark = log.mark()
    assert log.next("item") == 2
    log.note("item", 2)
    assert not log.are_expected
    log.forget(mark)
    assert log.given == [("item", 1)]
    assert log.next("item") == 2
    with pytest.raises(NeedsRealValues):
        log.next("item")


def test_layouts_that_were_taken_since_are_taken_again() -> None:
    kernel, earlier, shapes = torch.ops.aten.nonzero.default, DynamicShapes(), DynamicShapes()
    earlier.note(kernel, torch.ones(3, 2))
    shapes.expect(earlier)
    mark = shapes.mark()
    assert shapes.run(kernel, (torch.ones(4, 4, device="meta"),), {}).shape == (3, 2)
    with pytest.raises(NeedsRealValues):
        shapes.run(kernel, (torch.ones(4, 4, device="meta"),), {})
    shapes.forget(mark)
    assert shapes.run(kernel, (torch.ones(4, 4, device="meta"),), {}).shape == (3, 2)
