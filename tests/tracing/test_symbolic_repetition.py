"""Extractors without an example call forward twice: what a graph would not repeat is refused."""

from __future__ import annotations

import copy
import itertools
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import featx
from featx.errors import TraceError

CALLS = [0]


SEEN: list[int] = []


def _counted(x: torch.Tensor, seen: list[int] = SEEN) -> torch.Tensor:
    seen.append(1)
    return x * len(seen)


def _numbers() -> Iterator[int]:
    yield from itertools.count(1)


class _Model(nn.Module):
    """A model whose inputs featx cannot guess."""

    kept: Any

    def __init__(self, kept: Any = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.kept = kept

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.step(x @ self.weight, x))

    def step(self, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return h


class Iterates(_Model):
    def step(self, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return h * next(self.kept)


class Rotates(_Model):
    def step(self, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        self.kept.rotate(1)
        return h * self.kept[0]


class CountsInAGlobal(_Model):
    def step(self, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        CALLS[0] += 1
        return h * CALLS[0]


class CountsInADefault(_Model):
    def step(self, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return _counted(h)


class CountsInItsClass(_Model):
    count = 0

    def step(self, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        CountsInItsClass.count += 1
        return h * CountsInItsClass.count


class KeepsItsLastValue(_Model):
    def step(self, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        kept: torch.Tensor | None = self.kept
        self.kept = h
        return h if kept is None else h + kept


class Collects(_Model):
    def step(self, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        self.kept.append(h.sum())
        return h + len(self.kept)


class KeepsADraw(_Model):
    def step(self, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if "noise" not in self.kept:
            self.kept["noise"] = torch.randn(8)
        return h + self.kept["noise"]


class ComparesObjects(_Model):
    def step(self, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return h * 2 if x.contiguous() is x else h


class ComparesInAHelper(_Model):
    def step(self, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return h * 2 if _are_one(x, x.float()) else h


def _are_one(a: object, b: object) -> bool:
    return a is b


class AsksForAutocast(_Model):
    def step(self, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return h * 2 if torch.is_autocast_enabled("cpu") else h


class AsksForGradients(_Model):
    def step(self, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return h * 2 if torch.is_grad_enabled() else h


REFUSED = {
    Iterates: lambda: iter([1, 2, 3, 4]),
    Rotates: lambda: deque([1.0, 2.0, 3.0]),
    CountsInAGlobal: None,
    CountsInADefault: None,
    CountsInItsClass: None,
    KeepsItsLastValue: None,
    Collects: list,
    KeepsADraw: dict,
    ComparesObjects: None,
    ComparesInAHelper: None,
    AsksForAutocast: None,
    AsksForGradients: None,
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
def test_what_a_graph_would_not_repeat_is_refused(kind: type[_Model]) -> None:
    make_kept = REFUSED[kind]
    model = kind(make_kept() if make_kept else None).eval()
    before = CALLS[0], CountsInItsClass.count, len(SEEN)
    with pytest.raises(TraceError, match="example_inputs"):
        featx.create_feature_extractor(model, {"relu": "r"})
    assert (CALLS[0], CountsInItsClass.count, len(SEEN)) == before


def test_a_generator_is_refused_with_its_line() -> None:
    with pytest.raises(TraceError, match=r"advances an iterator .*\(generator\).*next\(self\.kept\)"):
        featx.create_feature_extractor(Iterates(_numbers()), {"relu": "r"}, tracer="symbolic")


class CachesATable(_Model):
    """Computes a table from its weight in the first call, and keeps it."""

    def step(self, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if "table" not in self.kept:
            self.kept["table"] = self.weight.exp().sum(0)
        return h + self.kept["table"]


def test_a_cache_of_what_weights_give_is_filled_in_each_call() -> None:
    torch.manual_seed(0)
    model = CachesATable({}).eval()
    eager = copy.deepcopy(model)
    extractor = featx.create_feature_extractor(model, {"relu": "r"})
    for _ in range(2):
        x = torch.randn(2, 8)
        assert torch.equal(extractor(x)["r"], eager(x))
    assert model.kept == {}


WARNED = [False]


class WarnsOnce(_Model):
    def step(self, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if not WARNED[0]:
            WARNED[0] = True
        return h + 1


def test_a_flag_that_the_first_call_sets_is_allowed() -> None:
    model, x = WarnsOnce().eval(), torch.randn(2, 8)
    extractor = featx.create_feature_extractor(model, {"relu": "r"})
    assert WARNED == [False]
    assert torch.equal(extractor(x)["r"], model(x))


TABLES: dict[str, torch.Tensor] = {}


class CachesInAGlobal(_Model):
    def step(self, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if "table" not in TABLES:
            TABLES["table"] = self.weight.exp().sum(0)
        return h + TABLES["table"]


def test_nothing_of_a_trace_stays_in_a_global() -> None:
    model, x = CachesInAGlobal().eval(), torch.randn(2, 8)
    extractor = featx.create_feature_extractor(model, {"relu": "r"})
    assert TABLES == {}
    assert torch.equal(extractor(x)["r"], model(x))
    TABLES.clear()


class CountsForALog(_Model):
    def step(self, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        CALLS[0] += 1
        return h if CALLS[0] < 100 else h * 2


def test_a_count_that_matters_later_is_refused() -> None:
    before = CALLS[0]
    with pytest.raises(TraceError, match=r"changes the value 0 .* in each call"):
        featx.create_feature_extractor(CountsForALog().eval(), {"relu": "r"})
    assert CALLS[0] == before


def test_symbolic_trace_calls_forward_once() -> None:
    model = Iterates(iter([1, 2]))
    assert "relu" in [node.name for node in featx.symbolic_trace(model).graph.nodes]
