"""State that functions and Python files keep between calls: default arguments, closures, globals, random tables."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import featx

KEPT: list[torch.Tensor] = []
TABLES: dict[Any, torch.Tensor] = {}
LOG: list[torch.Tensor] = []
NUMBERS = {"calls": 0}
X = torch.rand(2, 4, generator=torch.Generator().manual_seed(0))


def counter() -> Callable[[], float]:
    calls = 0

    def factor() -> float:
        nonlocal calls
        calls += 1
        return 1.0 if calls < 4 else 0.1

    return factor


COUNTER = counter()


def remembering(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    store: dict[str, torch.Tensor] = {}

    @functools.wraps(forward)
    def run(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if "first" not in store:
            store["first"] = x.sum()
        return forward(self, x) + store["first"]

    return run


@functools.lru_cache
def drawn_table(length: int) -> torch.Tensor:
    return torch.randn(length)


@functools.lru_cache
def counted_table(length: int) -> torch.Tensor:
    return torch.arange(length).float()


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)


class Counts(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * COUNTER()


class KeepsInDefault(Base):
    def forward(self, x: torch.Tensor, kept: list[torch.Tensor] = []) -> torch.Tensor:  # noqa: B006
        kept.append(x)
        return self.linear(x) + kept[0]


class KeepsInGlobal(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        KEPT.append(x)
        return self.linear(x) + KEPT[0]


class KeepsInDict(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if "mean" not in TABLES:
            TABLES["mean"] = x.mean()
        return self.linear(x) + TABLES["mean"]


class KeepsInClosure(Base):
    @remembering
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class DrawsTable(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + drawn_table(x.shape[1])


class DrawsOnce(Base):
    noise: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.noise is None:
            self.noise = torch.randn(4)
        return self.linear(x) + self.noise


class DrawsIntoDict(Base):
    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[int, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[-1]
        if length not in self.tables:
            self.tables[length] = torch.randn(length)
        return self.linear(x) + self.tables[length]


class Passes(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Positions:
    """A class that is no module, and holds what its functions have made."""

    tables: dict[int, torch.Tensor] = {}

    @classmethod
    def table(cls, length: int) -> torch.Tensor:
        if length not in cls.tables:
            cls.tables[length] = torch.arange(length).float()
        return cls.tables[length]


class CountsAheadOfAModule(Base):
    """The module that runs next has changed nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.passes = Passes()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        NUMBERS["calls"] += 1
        return self.passes(self.linear(x) * NUMBERS["calls"])


REFUSED = [
    Counts,
    CountsAheadOfAModule,
    KeepsInDefault,
    KeepsInGlobal,
    KeepsInDict,
    KeepsInClosure,
    DrawsTable,
    DrawsOnce,
    DrawsIntoDict,
]
ENTRIES: list[Callable[[nn.Module], Any]] = [
    lambda model: featx.create_feature_extractor(model, ["output"], example_inputs=X),
    lambda model: featx.trace(model, X),
]


def kept_by_files() -> list[Any]:
    defaults = KeepsInDefault.forward.__defaults__
    closure = KeepsInClosure.forward.__closure__
    cells = [cell.cell_contents for cell in (*(COUNTER.__closure__ or ()), *(closure or ()))]
    free = [each for each in cells if not callable(each)]
    containers = (KEPT, TABLES, NUMBERS, Positions.tables)
    return [repr(value) for value in (*containers, defaults, free)]


@pytest.mark.slow
@pytest.mark.parametrize("entry", ENTRIES, ids=["extractor", "trace"])
@pytest.mark.parametrize("kind", REFUSED)
def test_state_that_a_graph_would_repeat_is_refused_and_left_as_it_was(
    kind: type[Base], entry: Callable[[nn.Module], Any]
) -> None:
    before = kept_by_files()
    with pytest.raises(featx.TraceError):
        entry(kind().eval())
    assert kept_by_files() == before


class KeepsLog(Base):
    """Values that nobody reads."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        LOG.append(self.linear(x))
        return self.linear(x)


class FillsTable(Base):
    """A table that a graph can make again."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        if ("positions", length) not in TABLES:
            TABLES["positions", length] = torch.arange(length).float()
        return self.linear(x) + TABLES["positions", length] + counted_table(length)


class FillsTableOfAClass(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + Positions.table(x.shape[1])


class DrawsEachTime(Base):
    """Noise that is kept and drawn again in each call."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.noise = torch.rand(4)
        return self.linear(x) + self.noise


@pytest.mark.slow
@pytest.mark.parametrize("entry", ENTRIES, ids=["extractor", "trace"])
@pytest.mark.parametrize("kind", [KeepsLog, FillsTable, FillsTableOfAClass, DrawsEachTime])
def test_state_that_no_call_depends_on_is_allowed(kind: type[Base], entry: Callable[[nn.Module], Any]) -> None:
    model = kind().eval()
    before = kept_by_files()
    traced = entry(model)
    assert kept_by_files() == before
    assert LOG == []
    other = torch.rand(3, 4)
    torch.manual_seed(0)
    expected = model(other)
    torch.manual_seed(0)
    found = traced(other)
    assert torch.equal(found["output"] if isinstance(found, dict) else found, expected)
    for kept in (TABLES, LOG, Positions.tables):
        kept.clear()
