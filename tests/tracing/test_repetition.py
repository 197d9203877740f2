"""State that Python keeps between calls: a second call records another graph, and the trace is refused."""

from __future__ import annotations

import array
import collections
import contextlib
import contextvars
import copy
import functools
import io
import itertools
import logging
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import featx

X = torch.rand(3, 4, generator=torch.Generator().manual_seed(0))


class Keeping(nn.Module):
    """Scales its input by what `change` returns, which gets what the model keeps."""

    def __init__(self, held: Any, change: Callable[[Any], float]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.held = held
        self.change = change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x * self.change(self.held))


class Holder:
    def __init__(self, value: Any) -> None:
        self.value = value


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: float) -> None:
        self.value = value


class Counted:
    calls = 0.0


class Key:
    pass


KEY = Key()
CONTEXT: contextvars.ContextVar[float] = contextvars.ContextVar("CONTEXT", default=0.0)
LOCAL = threading.local()
ARRAY = np.zeros(1)
BY_KEY: weakref.WeakKeyDictionary[Key, float] = weakref.WeakKeyDictionary({KEY: 0.0})


def add_one(owner: Any, name: str = "value") -> float:
    setattr(owner, name, getattr(owner, name, 0.0) + 1)
    return getattr(owner, name)


def counted_in_a_closure() -> Callable[[Any], float]:
    calls = 0

    def count(held: Any) -> float:
        nonlocal calls
        calls += 1
        return float(calls)

    return count


def with_an_attribute(held: Any) -> float:
    return add_one(with_an_attribute, "calls")


def with_a_default(held: Any, calls: list[int] = []) -> float:  # noqa: B006 - that is what is tested
    calls.append(1)
    return float(len(calls))


def in_a_context(held: Any) -> float:
    CONTEXT.set(CONTEXT.get() + 1)
    return CONTEXT.get()


def in_an_array(held: Any) -> float:
    held[0] += 1
    return float(held[0])


def in_a_queue(held: Any) -> float:
    value = held.get()
    held.put(value + 1)
    return value


def in_a_deque(held: Any) -> float:
    held.append(held[-1] + 1)
    return held[-1]


def in_bytes(held: Any) -> float:
    held.write(b"a")
    return float(held.tell())


def by_key(held: Any) -> float:
    BY_KEY[KEY] += 1
    return BY_KEY[KEY]


def deep_inside(held: Any) -> float:
    return add_one(held.value.value.value)


def filled_queue() -> queue.Queue[float]:
    found: queue.Queue[float] = queue.Queue()
    found.put(1.0)
    return found


STATES: dict[str, tuple[Callable[[], Any], Callable[[], Callable[[Any], float]]]] = {
    "count": (itertools.count, lambda: lambda held: float(next(held))),
    "iterator": (lambda: iter([float(n) for n in range(100)]), lambda: lambda held: next(held)),
    "generator": (lambda: (float(n) for n in range(100)), lambda: lambda held: next(held)),
    "closure": (lambda: None, counted_in_a_closure),
    "function attribute": (lambda: None, lambda: with_an_attribute),
    "mutable default": (lambda: None, lambda: with_a_default),
    "context variable": (lambda: None, lambda: in_a_context),
    "thread local": (threading.local, lambda: add_one),
    "global thread local": (lambda: None, lambda: lambda held: add_one(LOCAL)),
    "slots": (lambda: Slotted(0.0), lambda: add_one),
    "deep object": (lambda: Holder(Holder(Holder(Holder(0.0)))), lambda: deep_inside),
    "queue": (filled_queue, lambda: in_a_queue),
    "deque": (lambda: collections.deque([1.0], 3), lambda: in_a_deque),
    "class attribute": (lambda: None, lambda: lambda held: add_one(Counted, "calls")),
    "bytes in memory": (io.BytesIO, lambda: in_bytes),
    "array": (lambda: array.array("d", [0.0]), lambda: in_an_array),
    "array of numpy": (lambda: np.zeros(1), lambda: in_an_array),
    "global array of numpy": (lambda: ARRAY, lambda: in_an_array),
    "weak dict": (lambda: None, lambda: by_key),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", STATES)
@pytest.mark.filterwarnings("ignore:.*itertools.*:DeprecationWarning")
def test_what_changes_from_call_to_call_is_refused(kind: str) -> None:
    make, change = STATES[kind]
    model = Keeping(make(), change())
    # A queue may hand work to another thread, which is heard where another one has run meanwhile.
    reason = r"a second call with the same inputs|kept between calls|changes the (value|attribute)|adds to|hands work"
    with pytest.raises(featx.TraceError, match=reason):
        featx.trace(model, X)
    with pytest.raises(featx.TraceError):
        featx.create_feature_extractor(model, ["linear"], example_inputs=X)


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(STATES.keys() - {"weak dict"}))  # whose entries nothing compares
@pytest.mark.filterwarnings("ignore:.*itertools.*:DeprecationWarning")
def test_what_changes_from_call_to_call_and_matters_in_a_later_call_is_refused(kind: str) -> None:
    make, change = STATES[kind]
    advance = change()

    def after_a_while(held: Any) -> float:
        return 1.0 if advance(held) < 50 else 2.0

    reason = r"changes an object of Python|kept between calls|changes the (value|attribute)|adds to|hands work"
    with pytest.raises(featx.TraceError, match=reason):
        featx.trace(Keeping(make(), after_a_while), X)
    with pytest.raises(featx.TraceError):
        featx.create_feature_extractor(Keeping(make(), after_a_while), ["linear"], example_inputs=X)


@pytest.mark.slow
@pytest.mark.parametrize(
    "steps",
    [
        lambda: itertools.count(1),
        lambda: itertools.chain(itertools.repeat(0.5, 3), itertools.repeat(1.0)),
        lambda: enumerate([0.5] * 9),
        lambda: zip([0.5] * 9, range(9), strict=True),
        lambda: map(float, range(1, 9)),
        lambda: iter({"a": 1, "b": 2}),
        lambda: itertools.cycle([0.5, 0.5, 1.0]),
    ],
)
@pytest.mark.filterwarnings("ignore:.*itertools.*:DeprecationWarning")
def test_iterator_that_only_advances_is_refused_in_the_model_and_keeps_a_submodule_whole(
    steps: Callable[[], Any],
) -> None:
    def advance(held: Any) -> float:
        next(held, None)
        return 1.0

    with pytest.raises(featx.TraceError, match="changes an object of Python in each call"):
        featx.trace(Keeping(steps(), advance), X)
    traced = featx.trace(nn.Sequential(Keeping(steps(), advance), nn.ReLU()), X)
    assert [node.target for node in traced.graph.nodes if node.op == "call_module"] == ["0", "1"]


def test_iterator_that_is_done_is_no_state() -> None:
    model = Keeping(iter([]), lambda held: next(held, 2.0))
    assert torch.equal(featx.trace(model, X)(X + 1), model.linear((X + 1) * 2))


@pytest.mark.filterwarnings("ignore:.*itertools.*:DeprecationWarning")
def test_iterator_of_a_submodule_that_is_kept_whole_is_advanced_by_it() -> None:
    def advance(held: Any) -> float:
        return 1.0 if next(held) < 4 else 2.0

    model = nn.Sequential(Keeping(itertools.count(), advance), nn.Linear(4, 4))
    copied = copy.deepcopy(model)
    extractor = featx.create_feature_extractor(model, ["0", "1"], example_inputs=X)
    for _ in range(8):
        assert torch.equal(extractor(X)["1"], copied(X))


def test_context_variable_that_forward_sets_is_put_back() -> None:
    variable: contextvars.ContextVar[float] = contextvars.ContextVar("variable", default=0.0)

    class Counting(nn.Module):
        steps = variable

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.steps.set(self.steps.get() + 1)
            return x if self.steps.get() < 9 else x * 2

    with pytest.raises(featx.TraceError, match="changes the value 'variable'"):
        featx.trace(Counting(), X)
    assert variable.get() == 0.0


EMPTY: contextvars.ContextVar[Any] = contextvars.ContextVar("EMPTY")


class SetsVariable(nn.Module):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        EMPTY.set(x.sum() if self.value is torch.Tensor else self.value)
        return x + 1


@pytest.mark.parametrize("value", [1.0, "text", None, ("a", 1), Key(), torch.Tensor])
def test_context_variable_without_a_value_has_none_after_a_trace(value: Any) -> None:
    model = nn.Sequential(SetsVariable(value), nn.Linear(4, 4))
    for make in (
        lambda: featx.create_feature_extractor(model, ["1"], example_inputs=X),
        lambda: featx.create_feature_extractor(model, ["0"], example_inputs=X),
        lambda: featx.trace(model, X),
        lambda: featx.symbolic_trace(model),
    ):
        with contextlib.suppress(featx.TraceError):
            make()
        assert EMPTY.get("unset") == "unset"


class FillsVariable(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if EMPTY.get(None) is None:
            EMPTY.set(Key())
            x = x * 2
        return x + 1


def test_the_second_call_finds_the_object_that_a_context_variable_has_got() -> None:
    with pytest.raises(featx.TraceError, match="second call"):
        featx.trace(FillsVariable(), X)


@pytest.mark.parametrize("kind", sorted(STATES.keys() - {"generator"}))  # which cannot be copied
@pytest.mark.filterwarnings("ignore:.*itertools.*:DeprecationWarning")
def test_submodule_that_does_something_else_in_each_call_is_kept_whole(kind: str) -> None:
    make, change = STATES[kind]
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(Keeping(make(), change())), nn.ReLU())
    traced = featx.trace(model, X)
    assert [node.target for node in traced.graph.nodes if node.op == "call_module"] == ["0", "1.0", "2"]
    assert not torch.equal(traced(X), traced(X))


class KeepsNumbers(nn.Module):
    """As torchvision's MultiScaleRoIAlign: what the first call finds out is kept for all others."""

    def __init__(self) -> None:
        super().__init__()
        self.scales: list[float] | None = None
        self.mapper: Holder | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.scales is None or self.mapper is None:
            self.scales, self.mapper = found_out(x)
        return scaled(x, self.scales, self.mapper)


@featx.wrap
def found_out(x: torch.Tensor) -> tuple[list[float], Holder]:
    return [float(x.shape[0])], Holder(x.shape[1])


@featx.wrap
def scaled(x: torch.Tensor, scales: list[float], mapper: Holder) -> torch.Tensor:
    return x * scales[0] + mapper.value


@pytest.mark.slow
def test_submodule_that_keeps_numbers_of_its_first_call_is_kept_whole() -> None:
    model = nn.Sequential(nn.ReLU(), KeepsNumbers())
    traced = featx.trace(copy.deepcopy(model), X)
    for x in (X, X[:2]):  # of the second one, the numbers of the first
        assert torch.equal(traced(x), model(x))


@pytest.mark.slow
def test_cache_by_size_that_the_first_call_fills_is_no_state() -> None:
    class Caching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.holder = Holder(Holder({}))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            tables = self.holder.value.value
            if "table" not in tables:
                tables["table"] = torch.arange(4.0)
            return x + tables["table"]

    model = Caching()
    assert torch.equal(featx.trace(model, X)(X), X + torch.arange(4.0))
    assert model.holder.value.value == {}


def test_property_that_is_cached_from_an_input_is_refused() -> None:
    class Cached(nn.Module):
        @functools.cached_property
        def scale(self) -> torch.Tensor:
            return self.seen.sum()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen = x
            return x * self.scale

    with pytest.raises(featx.TraceError, match="earlier call"):
        featx.trace(Cached(), X)


def test_value_that_is_kept_and_read_in_one_call_is_no_state() -> None:
    class Passing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen: Any = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen = x * 2
            return self.seen + 1

    model = Passing()
    assert torch.equal(featx.trace(model, X)(X + 1), (X + 1) * 2 + 1)
    assert model.seen is None


class Remembering(nn.Module):
    """Keeps the last three lengths of what it keeps, which stay three from the third call on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.kept = collections.deque([0], maxlen=3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept.append(len(self.kept))
        return self.linear(x)


class ReadsWhatItsPartKeeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = Remembering()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(x) * len(self.part.kept)


class Starting(nn.Module):
    """Does something else in its first call only, as nobody sees who looks at its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.first = iter([2.0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * next(self.first, 1.0)


class Tabled(nn.Module):
    """Registers its tables in its first call, and is followed from the second call on."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if not hasattr(self, "table"):
            self.register_buffer("table", torch.linspace(1, 2, x.shape[1]))
        return x * self.table, x + self.table


class UsesTables(nn.Module):
    """Uses what its part gives, and the length of a deque that the second call fills if it is `filled` so late."""

    def __init__(self, is_filled: bool) -> None:
        super().__init__()
        self.part = Tabled()
        self.kept = collections.deque([0] * is_filled, maxlen=2 - is_filled)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled, shifted = self.part(x)
        self.kept.append(0)
        return scaled * shifted * len(self.kept)


def test_module_that_is_followed_from_its_second_call_on_is_no_state() -> None:
    model = UsesTables(is_filled=True)
    extractor = featx.create_feature_extractor(model, ["part", "mul_1"], example_inputs=X)
    for x in (X, X + 1):
        scaled, shifted = Tabled()(x)
        got = extractor(x)
        assert torch.equal(got["mul_1"], scaled * shifted)
        assert [torch.equal(*pair) for pair in zip(got["part"], (scaled, shifted), strict=True)] == [True, True]


class AddsItsState(nn.Module):
    """Adds what it has kept of its last call, from the second call on, to what depends on no input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.kept = nn.Linear(4, 4), None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ones = torch.ones(x.shape)
        y = ones if self.kept is None else ones + self.kept.mean()
        self.kept = ones.detach()
        return self.linear(y)


class AddsItsResult(AddsItsState):
    """Keeps the result of its layer, and adds it to what the layer gets from the second call on."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ones = torch.ones(x.shape)
        y = self.linear(ones if self.kept is None else ones + self.kept.mean())
        self.kept = y.detach()
        return y


class FillsBesideTables(UsesTables):
    def __init__(self) -> None:
        super().__init__(is_filled=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        (ReadsWhatItsPartKeeps, ["part", "mul"]),
        (Starting, ["mul"]),
        (FillsBesideTables, ["part", "mul_1"]),
        (AddsItsState, ["linear"]),
        (AddsItsResult, ["linear"]),
    ],
)
def test_model_that_does_something_else_in_its_first_call_alone_is_refused(
    kind: type[nn.Module], wanted: list[str]
) -> None:
    with pytest.raises(featx.TraceError, match="a second call"):
        featx.create_feature_extractor(kind(), wanted, example_inputs=X)


@pytest.mark.slow
def test_tables_that_are_made_in_the_first_call_and_for_longer_inputs_are_no_state() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table: Any = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.table is None or self.table.shape[0] < x.shape[1]:
                self.table = torch.arange(x.shape[1], dtype=x.dtype).sin() * 0.5
            return x + self.table[: x.shape[1]]

    model = Positions()
    traced = featx.trace(model, X)
    assert model.table is None
    for x in (X, torch.rand(3, 4), torch.rand(2, 9)):
        assert torch.equal(traced(x), Positions()(x))


def test_second_call_is_compared_without_a_second_trace(caplog: pytest.LogCaptureFixture) -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
            return self.linear(x).relu().view(x.shape[0], -1) * scale

    with caplog.at_level(logging.DEBUG, "featx"):
        featx.trace(Plain().eval(), torch.rand(2, 4))
    runs = [each for each in caplog.messages if "a second call" in each]
    assert runs
    assert all("against the record of the first" in each for each in runs)


class Box:
    """An object that holds one thing."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Counting(nn.Module):
    """Counts its calls, some objects deep."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.innermost = self.outermost = Box(0.0)
        for _ in range(depth - 1):
            self.outermost = Box(self.outermost)

    def innermost_of_all(self) -> Box:
        box = self.outermost
        while isinstance(box.value, Box):
            box = box.value
        return box

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.innermost_of_all().value += 1.0
        return x + 1


@pytest.mark.parametrize("depth", [1, 3, 6, 12])
def test_count_of_a_module_that_is_kept_whole_and_that_others_read_is_refused(depth: int) -> None:
    class Reading(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.counting = Counting(depth)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.counting(x) * self.counting.innermost_of_all().value

    with pytest.raises(featx.TraceError):
        featx.create_feature_extractor(Reading(), ["mul"], example_inputs=X)


@functools.cache
def settings(of: str) -> dict[str, Any]:
    return {"calls": 0, "seen": [of]}


@pytest.mark.parametrize("change", [
    lambda known: known.update(calls=known["calls"] + 1) or known["calls"],
    lambda known: known["seen"].append(1.0) or len(known["seen"]),
], ids=["a number", "a list"])  # fmt: skip
def test_change_of_what_a_cached_function_has_returned_is_refused_and_undone(change: Callable[[Any], float]) -> None:
    class Changing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * change(settings("test"))

    with pytest.raises(featx.TraceError, match="changes the value"):
        featx.trace(Changing(), X)
    assert settings("test") == {"calls": 0, "seen": ["test"]}
