"""A module that cannot be looked into after all: what was recorded in it is taken back."""

from __future__ import annotations

import contextlib
import copy
import random
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import featx
from featx.ir.memory import memory_of
from featx.tracing.calls.value_log import ValueLog
from featx.tracing.history.noted_set import NotedSet
from featx.tracing.side_effects.foreign_tensors import ForeignTensors
from featx.tracing.side_effects.recent_writes import RecentWrites
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


class Adds(nn.Module):
    """What it adds to a tensor that was there before is read after it, and it cannot be looked into."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        random.random()
        return x


class Counts(Adds):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        super().forward(self.count)
        return x * self.count


class Inside(nn.Module):
    """Another module around it, which can be looked into until it draws."""

    def __init__(self, inner: nn.Module, *, draws: bool) -> None:
        super().__init__()
        self.inner = inner
        self.draws = draws

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        x = self.inner(x)
        if self.draws:
            random.random()
        return x


class Decides(nn.Module):
    def __init__(self, inner: nn.Module, most: float) -> None:
        super().__init__()
        self.inner = inner
        self.most = most

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x.clone())
        return y * 2 if y.sum().item() > self.most else y


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
@pytest.mark.parametrize(
    ("inner", "most"),
    [
        (Adds(), 16.5), (Counts(), 8.5), (Inside(Adds(), draws=False), 24.5), (Inside(Adds(), draws=True), 24.5),
        (Inside(nn.Identity(), draws=True), 16.5),
    ],
)  # fmt: skip
def test_what_a_module_has_written_is_put_back_before_it_is_called_as_one_node(
    inner: nn.Module, most: float, dtype: torch.dtype
) -> None:
    x = torch.ones(2, 4, dtype=dtype)
    model = Decides(copy.deepcopy(inner), most).eval()
    traced = featx.trace(copy.deepcopy(model), x)
    got, expected = traced(x), model(x)
    assert torch.equal(got, expected)
    assert expected.sum() < most, "a further addition would decide otherwise"
    assert torch.equal(x, torch.ones(2, 4, dtype=dtype))


def test_recent_writes_are_put_back_mark_by_mark() -> None:
    writes, old, other = RecentWrites(), torch.zeros(2), torch.zeros(2)
    writes.save([old])  # there is no mark
    outer = writes.mark()
    new = torch.zeros(2)
    writes.note_made([memory_of(new)])
    for tensor in (old, new):
        writes.save([tensor])
        tensor.add_(1)
    inner = writes.mark()
    for tensor in (old[:1], new, other):
        writes.save([tensor])
        tensor.add_(1)
    writes.forget(inner)
    assert [each.tolist() for each in (old, new, other)] == [[1, 1], [1, 1], [0, 0]]
    inner = writes.mark()
    for tensor in (old, other):
        writes.save([tensor])
        tensor.add_(1)
    writes.release(inner)
    version = old._version
    writes.forget(outer)
    assert [each.tolist() for each in (old, new, other)] == [[0, 0], [1, 1], [0, 0]]
    assert old._version == version
    assert not writes.are_saved


@dataclass
class Pair:
    x: torch.Tensor
    y: torch.Tensor


class CopiesInInferenceMode(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.ReLU(inplace=True)

    def forward(self, pair: Pair) -> torch.Tensor:
        x = self.layer(pair.x)
        with torch.inference_mode():
            pair.y.copy_(x)
        return x


@torch.no_grad()
def test_what_was_saved_in_inference_mode_is_put_back_after_it() -> None:
    foreign, tensor = ForeignTensors([]), torch.zeros(2)
    with torch.inference_mode():
        foreign.save([tensor])
        tensor.add_(1)
    foreign.restore()
    assert tensor.tolist() == [0, 0]
    with contextlib.suppress(featx.TraceError):
        featx.trace(CopiesInInferenceMode(), Pair(torch.rand(2), torch.rand(2)))
