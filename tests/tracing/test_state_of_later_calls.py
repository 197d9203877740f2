"""State of Python that changes in each call, and by which the model decides in its fourth one."""

from __future__ import annotations

import collections
import contextvars
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import featx

X = torch.rand(2, 4, generator=torch.Generator().manual_seed(0))
CALLS = 6


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.count = 0

    def early_or_late(self, x: torch.Tensor, is_early: bool) -> torch.Tensor:
        return self.linear(x) if is_early else self.linear(x) * 0.5


@dataclasses.dataclass(frozen=True)
class Step:
    number: int = 0


class Plain:
    def __init__(self, number: int) -> None:
        self.number = number


class Slots:
    __slots__ = ("left",)

    def __init__(self) -> None:
        self.left = (1, 2, 3)


Named = collections.namedtuple("Named", "number")
Level = enum.Enum("Level", [f"at_{number}" for number in range(2 * CALLS)])

# What there is at first, what takes its place in each call, and whether it is that of an early call.
REPLACED: dict[str, tuple[Any, Callable[[Any], Any], Callable[[Any], bool]]] = {
    "shorter list": ([1, 2, 3], lambda held: held[1:], bool),
    "longer list": ([], lambda held: [*held, 1], lambda held: len(held) < 4),
    "tuple": ((), lambda held: (*held, 1), lambda held: len(held) < 4),
    "bytes": (b"", lambda held: held + b"a", lambda held: len(held) < 4),
    "dict": ({}, lambda held: {**held, len(held): 1}, lambda held: len(held) < 4),
    "set": (frozenset(), lambda held: held | {len(held)}, lambda held: len(held) < 4),
    "deque": (collections.deque(), lambda held: collections.deque([*held, 1]), lambda held: len(held) < 4),
    "object": (Plain(0), lambda held: Plain(held.number + 1), lambda held: held.number < 4),
    "frozen": (Step(), lambda held: Step(held.number + 1), lambda held: held.number < 4),
    "named": (Named(0), lambda held: Named(held.number + 1), lambda held: held.number < 4),
    "enum": (Level.at_0, lambda held: Level(held.value + 1), lambda held: held.value < 5),
    "decimal": (decimal.Decimal(0), lambda held: held + 1, lambda held: held < 4),
    "fraction": (fractions.Fraction(0), lambda held: held + 1, lambda held: held < 4),
    "range": (range(0), lambda held: range(len(held) + 1), lambda held: len(held) < 4),
    "slice": (slice(0), lambda held: slice(held.stop + 1), lambda held: held.stop < 4),
    "numpy": (np.int64(0), lambda held: held + 1, lambda held: held < 4),
    "date": (datetime.date(2020, 1, 1), lambda held: held + datetime.timedelta(1), lambda held: held.day < 5),
    "size": (torch.Size([]), lambda held: torch.Size([*held, 1]), lambda held: len(held) < 4),
    "tensor": (torch.zeros(1), lambda held: torch.cat([held, torch.zeros(1)]), lambda held: len(held) < 5),
}

# What is changed in place.
CHANGED: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], bool]]] = {
    "popitem": (lambda: {1: 1, 2: 1, 3: 1}, lambda held: held and held.popitem(), bool),
    "pop": (lambda: {1: 1, 2: 1, 3: 1}, lambda held: held and held.pop(next(iter(held))), bool),
    "order": (
        lambda: collections.OrderedDict.fromkeys([1, 2, 3, 4]),
        lambda held: held.move_to_end(next(iter(held))),
        lambda held: next(iter(held)) < 4,
    ),
    "item": (lambda: {"left": [1, 2, 3]}, lambda held: held.update(left=held["left"][1:]), lambda held: held["left"]),
    "attribute": (Slots, lambda held: setattr(held, "left", held.left[1:]), lambda held: held.left),
}  # fmt: skip


class Replacing(Linear):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.held, self.step, self.is_early = REPLACED[kind]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.held = self.step(self.held)
        return self.early_or_late(x, self.is_early(self.held))


class Changing(Linear):
    def __init__(self, kind: str) -> None:
        super().__init__()
        make, self.step, self.is_early = CHANGED[kind]
        self.held = make()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.early_or_late(x, bool(self.is_early(self.held)))
        self.step(self.held)
        return result


LIST: list[int] = []
STEP = Step()
ITEMS = {"left": [1, 2, 3]}
VARIABLE = contextvars.ContextVar[tuple[int, ...]]("VARIABLE", default=())
LOCAL = threading.local()
LOCAL.left = (1, 2, 3)


class Settings:
    seen: list[int] = []
    step = Step()


class InGlobalList(Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        global LIST
        LIST = [*LIST, 1]
        return self.early_or_late(x, len(LIST) < 4)


class InGlobalObject(Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        global STEP
        STEP = Step(STEP.number + 1)
        return self.early_or_late(x, STEP.number < 4)


class InGlobalItem(Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.early_or_late(x, bool(ITEMS["left"]))
        ITEMS["left"] = ITEMS["left"][1:]
        return result


class InClass(Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Settings.seen = [*Settings.seen, 1]
        return self.early_or_late(x, len(Settings.seen) < 4)


class InContext(Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        VARIABLE.set((*VARIABLE.get(), 1))
        return self.early_or_late(x, len(VARIABLE.get()) < 4)


class InThread(Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.early_or_late(x, bool(LOCAL.left))
        LOCAL.left = LOCAL.left[1:]
        return result


def reader(module: Any, x: torch.Tensor) -> torch.Tensor:
    return x if module.count < 4 else x * 0.5


READERS = {"late": reader}


def warming_up(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(forward)
    def counted(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return self.linear(x) if self.count < 4 else forward(self, x)

    return counted


class ReadByDecorator(Linear):
    @warming_up
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * 0.5


class ReadByFunctionInDict(Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return READERS["late"](self, self.linear(x))


class ReadByDefault(Linear):
    def forward(self, x: torch.Tensor, read: Callable[..., torch.Tensor] = reader) -> torch.Tensor:
        self.count += 1
        return read(self, self.linear(x))


class ReadByObject(Linear):
    class Reader:
        def __call__(self, module: Any, x: torch.Tensor) -> torch.Tensor:
            return reader(module, x)

    def __init__(self) -> None:
        super().__init__()
        self.read = self.Reader()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return self.read(self, self.linear(x))


class ListReadByFunctionInDict(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(1)
        return READERS["length"](self, self.linear(x))


READERS["length"] = lambda module, x: x if len(module.seen) < 4 else x * 0.5
PLACES: list[Callable[[], nn.Module]] = [
    InGlobalList, InGlobalObject, InGlobalItem, InClass, InContext, InThread, ReadByDecorator, ReadByFunctionInDict,
    ReadByDefault, ReadByObject, ListReadByFunctionInDict,
]  # fmt: skip
MODELS = {
    **{f"{kind} replaced": functools.partial(Replacing, kind) for kind in REPLACED},
    **{f"{kind} changed": functools.partial(Changing, kind) for kind in CHANGED},
    **{kind.__name__: kind for kind in PLACES},  # pyright: ignore[reportAttributeAccessIssue]
}


@pytest.mark.parametrize("name", MODELS)
def test_what_later_calls_decide_by_is_refused(name: str) -> None:
    outside = LIST, STEP, dict(ITEMS), Settings.seen, VARIABLE.get(), LOCAL.left
    model = MODELS[name]().eval()
    held = repr(vars(model).get("held"))
    with pytest.raises(featx.TraceError):
        featx.create_feature_extractor(model, ["output"], example_inputs=(X,))
    assert (LIST, STEP, dict(ITEMS), Settings.seen, VARIABLE.get(), LOCAL.left) == outside
    assert repr(vars(model).get("held")) == held
    assert model.count == 0


class Counting(Linear):
    """Keeps what no code reads, and what each call assigns before it reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []
        self.shape = torch.Size()
        self.values: list[torch.Tensor] = []
        self.tables: dict[int, torch.Tensor] = {}
        self.options: dict[str, int] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.shapes.append(tuple(x.shape))
        self.shape = x.shape
        self.values = []
        self.values = [*self.values, self.linear(x), x]
        if self.shape[0] not in self.tables:
            self.tables[self.shape[0]] = torch.arange(self.shape[0])[:, None]
        if self.options is None:
            self.options = {"scale": 2}
        return (self.values[0] + self.values[1] + self.tables[self.shape[0]]) * self.options["scale"]


def test_what_no_later_call_decides_by_is_followed() -> None:
    model = Counting().eval()
    extractor = featx.create_feature_extractor(model, ["output"], example_inputs=(X,))
    for _ in range(CALLS):
        assert torch.equal(extractor(X)["output"], model(X))
