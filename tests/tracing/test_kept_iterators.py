"""Iterators in a model's file: a trace neither advances them nor takes what they give for a constant."""

from __future__ import annotations

import collections
import copy
import itertools
import operator
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from types import GeneratorType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import featx
from featx.tracing.file_globals.holders import Holder
from featx.tracing.file_globals.kept_iterators import KeptIterators
from featx.tracing.signals import Untraceable

X = torch.rand(2, 4, generator=torch.Generator().manual_seed(0))


def numbers() -> Iterator[int]:
    yield from range(1000)


GENERATOR = numbers()
SENT_TO = numbers()
LOOPED = numbers()
OF_RANGE = iter(range(1000))
MAPPED = map(abs, range(1000))
ZIPPED = zip(range(1000), range(1000), strict=True)
CYCLE = itertools.cycle(range(1000))
IN_TEE = numbers()
IN_LIST = [numbers()]
IN_DEQUE = collections.deque([numbers()])
IN_DICTS = {"a": {"b": [numbers()]}}
IN_OBJECT = SimpleNamespace(steps=numbers())


class Slotted:
    __slots__ = ("steps",)

    def __init__(self) -> None:
        self.steps = numbers()


class OfClass:
    steps = numbers()


IN_SLOTS = Slotted()


def closure() -> Callable[[], int]:
    steps = numbers()
    return lambda: next(steps)


def by_default(steps: Iterator[int] = numbers()) -> int:  # noqa: B008
    return next(steps)


def by_name(*, steps: Iterator[int] = numbers()) -> int:  # noqa: B008
    return next(steps)


def counted_by_default(steps: Iterator[int] = itertools.count()) -> int:  # noqa: B008
    return next(steps)


def in_a_loop() -> int:
    for number in LOOPED:
        return number
    return -1


IN_CLOSURE = closure()
ADVANCING: dict[str, Callable[[], Any]] = {
    "generator": lambda: next(GENERATOR),
    "send": lambda: SENT_TO.send(None),  # type: ignore[attr-defined]
    "loop": in_a_loop,
    "range": lambda: next(OF_RANGE),
    "map": lambda: next(MAPPED),
    "zip": lambda: next(ZIPPED)[0],
    "cycle": lambda: next(CYCLE),
    "list": lambda: next(IN_LIST[0]),
    "deque": lambda: next(IN_DEQUE[0]),
    "dicts": lambda: next(IN_DICTS["a"]["b"][0]),
    "object": lambda: next(IN_OBJECT.steps),
    "slots": lambda: next(IN_SLOTS.steps),
    "class": lambda: next(OfClass.steps),
    "closure": lambda: IN_CLOSURE(),
    "default": lambda: by_default(),
    "default by name": lambda: by_name(),
}


class Advancing(nn.Module):
    def __init__(self, advance: Callable[[], int]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.advance = advance

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * float(self.advance())


@pytest.mark.parametrize("place", ADVANCING)
@pytest.mark.parametrize("is_whole", [False, True])
def test_iterator_of_a_file_is_not_advanced_by_a_trace(place: str, is_whole: bool) -> None:
    advance = ADVANCING[place]
    inner = Advancing(advance)
    model = nn.Sequential(nn.Linear(4, 4), inner) if is_whole else inner
    first = advance()
    with pytest.raises(featx.TraceError, match=r"advances an iterator .* give forward what the iterator returns"):
        featx.create_feature_extractor(model, ["1" if is_whole else "mul"], example_inputs=X)
    with pytest.raises(featx.TraceError, match="advances an iterator"):
        featx.trace(model, X)
    with pytest.raises(featx.TraceError, match="advances an iterator"):
        featx.symbolic_trace(model)
    assert advance() == first + 1


def test_counter_in_a_default_goes_on_where_it_was() -> None:
    first = counted_by_default()
    with pytest.raises(featx.TraceError):
        featx.trace(Advancing(lambda: counted_by_default()), X)
    assert counted_by_default() == first + 1


class AdvancingLater(nn.Module):
    """Advances a generator of its own after its first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.steps = numbers()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * next(self.steps)


def test_generator_of_a_module_that_is_advanced_after_the_requested_value_is_refused() -> None:
    model = AdvancingLater()
    with pytest.raises(featx.TraceError, match=r"advances an iterator that is kept between calls \(generator\)"):
        featx.create_feature_extractor(model, ["linear"], example_inputs=X)
    assert next(model.steps) == 0


BESIDE = iter([1, 2, 3])
PAIR = (BESIDE, 0)
BY_ITERATOR = {BESIDE: 10}


def test_iterators_that_forward_does_not_advance_answer_as_they_are() -> None:
    class Asking(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            answers = [
                isinstance(GENERATOR, GeneratorType), type(GENERATOR) is GeneratorType, hasattr(GENERATOR, "send"),
                GENERATOR.gi_frame is not None, IN_LIST[0] is not GENERATOR, BESIDE in PAIR, BESIDE in BY_ITERATOR,
                operator.length_hint(BESIDE) == 3, not hasattr(BESIDE, "send"), repr(BESIDE)[:5] == "<list",
                next(copy.copy(BESIDE)) == 1, iter(BESIDE) is BESIDE, not callable(BESIDE),
            ]  # fmt: skip
            return x + sum(answers)

    model = Asking()
    assert torch.equal(model(X), X + 13)
    assert torch.equal(featx.trace(model, X)(X), X + 13)
    assert type(GENERATOR) is GeneratorType
    assert next(BESIDE) == 1


def test_iterators_that_are_advanced_by_another_one_are_refused() -> None:
    class Teeing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + next(itertools.tee(IN_TEE)[0])

    with pytest.raises(featx.TraceError, match="advances an iterator"):
        featx.trace(Teeing(), X)
    assert next(IN_TEE) == 0


IN_CONTEXT: ContextVar[Iterator[int]] = ContextVar("IN_CONTEXT")


@pytest.mark.parametrize("trace", [lambda model: featx.trace(model, X), featx.symbolic_trace])
def test_a_context_variable_keeps_its_iterator(trace: Callable[[nn.Module], Any]) -> None:
    class Beside(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + (1 if IN_CONTEXT.get(None) is None else 2)

    steps = numbers()
    token = IN_CONTEXT.set(steps)
    try:
        assert torch.equal(trace(Beside())(X), X + 2)
        assert IN_CONTEXT.get() is steps
    finally:
        IN_CONTEXT.reset(token)


def test_other_threads_advance_it_meanwhile() -> None:
    steps = numbers()
    held: dict[str, Any] = {"steps": steps, "others": [steps]}
    holders = [Holder(held), Holder(held["others"])]
    one, other = KeptIterators(holders), KeptIterators(holders)
    with ThreadPoolExecutor(1) as pool:
        one.replace()
        assert held["steps"] is held["others"][0] is not steps
        assert pool.submit(lambda: next(held["steps"])).result() == 0
        pool.submit(other.replace).result()
        one.put_back()
        one.put_back()
        assert next(held["others"][0]) == 1
        with pytest.raises(Untraceable):
            pool.submit(lambda: next(held["steps"])).result()
        pool.submit(other.put_back).result()
    assert held["steps"] is held["others"][0] is steps
    assert next(steps) == 2
