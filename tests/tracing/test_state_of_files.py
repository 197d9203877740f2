"""State that functions and Python files keep between calls: default arguments, closures, globals, random tables."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import featx
from featx.tracing.environment.other_threads import OtherThreads
from featx.tracing.file_globals.caches import Caches

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


def counting_class() -> tuple[type[Any], Callable[[], int]]:
    """Return a class that no file names, and a function that counts in it."""

    class Calls:
        count = 0

    def count() -> int:
        Calls.count += 1
        return Calls.count

    return Calls, count


class CountsInClass(Base):
    def __init__(self, holds_class: bool) -> None:
        super().__init__()
        calls, count = counting_class()
        self.count = count
        if holds_class:
            self.calls = calls
            self.count = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.count is not None:
            return self.linear(x) * float(self.count())
        self.calls.count += 1
        return self.linear(x) * float(self.calls.count)


@pytest.mark.parametrize("entry", ENTRIES, ids=["extractor", "trace"])
@pytest.mark.parametrize("holds_class", [True, False])
def test_a_class_that_no_file_names_counts_on_from_where_it_was(
    entry: Callable[[nn.Module], Any], holds_class: bool
) -> None:
    model = CountsInClass(holds_class).eval()
    with pytest.raises(featx.TraceError):
        entry(model)
    assert torch.equal(model(X), model.linear(X))  # its first call


@pytest.mark.parametrize("holds_class", [True, False])
def test_a_symbolic_trace_leaves_the_count_of_a_class_that_no_file_names(holds_class: bool) -> None:
    model = CountsInClass(holds_class).eval()
    featx.symbolic_trace(model)
    assert torch.equal(model(X), model.linear(X))  # its first call


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


SEEN: set[Any] = set()
STATE: dict[str, Any] = {"mode": ("a", 1), "old": None}
CALLS: list[Any] = [None, ("first",)]
LAST: Any = None


class Shared:
    last: Any = None
    seen: list[Any] = []


class LeavesConstants(nn.Module):
    """None and tuples of plain values, where others or none were before."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        global LAST
        SEEN.add((1, 2))
        STATE.update(done=None, mode=("a", ("b", None)))
        STATE.pop("old", None)
        CALLS.pop(0)
        CALLS.append(("call",))
        Shared.last, LAST = (1, 2), ("x",)
        Shared.seen.append(None)
        return x + 1


def constants() -> list[Any]:
    return [set(SEEN), dict(STATE), list(CALLS), LAST, Shared.last, list(Shared.seen)]


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no thread of the test runner count as one that may have added something."""
    monkeypatch.setattr(OtherThreads, "have_run", lambda self: False)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("opened", ["0", "1"])
def test_constants_that_a_call_leaves_are_put_back(opened: str) -> None:
    model = nn.Sequential(LeavesConstants(), nn.Linear(4, 4)).eval()
    before = constants()
    featx.create_feature_extractor(model, [opened], example_inputs=X)
    assert constants() == before
    with contextlib.suppress(featx.TraceError):
        featx.trace(model, X)
    assert constants() == before
    with contextlib.suppress(featx.TraceError):
        featx.get_graph_node_names(model, tracer="symbolic")
    assert constants() == before


class AddsOnce(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        is_first = "added" not in STATE
        STATE["added"] = None
        return x if is_first else x + 1


class TakesAway(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if CALLS.pop(0) is None else x + 1


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("kind", [AddsOnce, TakesAway])
def test_the_second_call_finds_the_constants_that_the_first_one_has_left(kind: type[nn.Module]) -> None:
    before = constants()
    with pytest.raises(featx.TraceError, match="second call"):
        featx.trace(kind().eval(), X)
    assert constants() == before


@pytest.mark.usefixtures("alone")
def test_a_module_that_leaves_a_constant_for_its_next_call_is_kept_whole() -> None:
    model = nn.Sequential(AddsOnce(), nn.Linear(4, 4)).eval()
    traced = featx.create_feature_extractor(model, ["1"], example_inputs=X)
    try:
        first, second = traced(X)["1"], traced(X)["1"]
        assert torch.equal(first, model[1](X))
        assert torch.equal(second, model[1](X + 1))
    finally:
        del STATE["added"]


@pytest.mark.parametrize("has_thread", [False, True])
def test_what_another_thread_may_have_added_stays(has_thread: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_thread:  # of the test runner there may be one
        monkeypatch.setattr(OtherThreads, "have_run", lambda self: False)
    names: dict[str, Any] = {"__name__": "model", "STATE": {"a": None}, "SEEN": set(), "LOG": [("a",)], "LAST": None}
    caches = Caches([names], [])

    def change() -> None:
        sum(range(100_000))
        names["STATE"]["b"] = ("b",)
        names["SEEN"].add((1,))
        names["LOG"].append(None)
        names["LAST"] = ("b",)
        has_run.set()
        is_over.wait()

    has_run, is_over = threading.Event(), threading.Event()
    is_over.set()
    if has_thread:
        is_over.clear()
        thread = threading.Thread(target=change)
        thread.start()
        has_run.wait()
        caches.restore(lambda tensor: False)
        is_over.set()
        thread.join()
    else:
        change()
        caches.restore(lambda tensor: False)
    added = {"STATE": {"a": None, "b": ("b",)}, "SEEN": {(1,)}, "LOG": [("a",), None]}
    without = {"STATE": {"a": None}, "SEEN": set(), "LOG": [("a",)]}
    assert names == {"__name__": "model", "LAST": None, **(added if has_thread else without)}


def test_an_object_that_has_taken_the_place_of_none_stays() -> None:
    made = object()
    names: dict[str, Any] = {"__name__": "model", "MADE": None}
    caches = Caches([names], [])
    names["MADE"] = made
    caches.restore(lambda tensor: False)
    assert names["MADE"] is made
