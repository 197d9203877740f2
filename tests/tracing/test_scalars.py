"""Traced numbers: what they compute is what plain numbers compute, and each step is recorded."""

from __future__ import annotations

import copy
import math
import operator
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import featx
from featx import Graph, Node
from featx.tracing.guards.disguises import disguise_as_larger
from featx.tracing.guards.scalars import TracedFloat, TracedInt, plain_number, plain_numbers, traced_number
from featx.tracing.signals import Diverged


class Trace:
    """Notes what is recorded, and gives results that it follows too."""

    def __init__(self) -> None:
        self.computed: list[tuple[Any, Any]] = []
        self.decided: list[tuple[Any, Any]] = []
        self.recording = True

    def is_recording(self) -> bool:
        return self.recording

    def compute(self, function: Callable[..., Any], args: tuple[Any, ...], result: Any) -> Any:
        self.computed.append((function, tuple(map(plain_number, args))))
        assert result == function(*map(plain_number, args))
        return traced_number(result, None, self)

    def decide(self, function: Callable[..., Any], args: tuple[Any, ...], result: bool) -> None:
        self.decided.append((function, tuple(map(plain_number, args))))
        assert result == function(*map(plain_number, args))

    def on_conversion(self) -> None:
        pass

    def on_later_use(self, other: Any) -> None:
        pass

    def record_cache_key(self, number: Any) -> bool:
        return False

    def note_text_in_cache_key(self, text: str) -> bool:
        return False

    def is_message(self) -> bool:
        return False

    def node_of(self, origin: Any) -> Node:
        return Graph().placeholder("x")


BINARY = [
    operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod, operator.pow,
    operator.lshift, operator.rshift, operator.and_, operator.or_, operator.xor,
]  # fmt: skip
BITWISE = BINARY[-5:]


@pytest.mark.parametrize("function", BINARY, ids=lambda function: function.__name__)
@pytest.mark.parametrize(("number", "other"), [(7, 3), (7, 2.5), (2.5, 3), (2.5, 0.5)])
def test_arithmetic_gives_the_plain_result_and_is_recorded(
    function: Callable[..., Any], number: float, other: float
) -> None:
    if function in BITWISE and not type(number) is type(other) is int:
        return
    trace = Trace()
    result = function(traced_number(number, None, trace), other)
    assert plain_number(result) == function(number, other)
    assert type(plain_number(result)) is type(function(number, other))
    assert isinstance(result, (TracedInt, TracedFloat))
    assert trace.computed == [(function, (number, other))]
    assert trace.decided == []


@pytest.mark.parametrize("function", BINARY, ids=lambda function: function.__name__)
@pytest.mark.parametrize(("number", "other"), [(7, 3), (2.5, 3), (2.5, 0.5)])
def test_arithmetic_from_the_right_keeps_the_order(function: Callable[..., Any], number: float, other: float) -> None:
    if function in BITWISE and not type(number) is type(other) is int:
        return
    trace = Trace()
    result = function(other, traced_number(number, None, trace))
    assert plain_number(result) == function(other, number)
    assert trace.computed == [(function, (other, number))]


@pytest.mark.parametrize("function", [operator.neg, abs, math.ceil, math.floor, math.trunc, round, operator.invert])
@pytest.mark.parametrize("number", [7, -2.5])
def test_function_of_one_number_gives_the_plain_result(function: Callable[..., Any], number: float) -> None:
    trace = Trace()
    traced = traced_number(number, None, trace)
    try:
        expected = function(number)
    except TypeError:
        return
    result = function(traced)
    assert plain_number(result) == expected
    assert len(trace.computed) == 1


@pytest.mark.parametrize("name", ["eq", "ne", "lt", "gt", "le", "ge"])
def test_comparison_is_a_plain_answer_and_a_decision(name: str) -> None:
    function = getattr(operator, name)
    for number in (2, 3, 2.0):
        for other in (2, 3.5):
            trace = Trace()
            answer = function(traced_number(number, None, trace), other)
            assert answer is function(number, other)
            assert trace.decided == [(function, (number, other))]


@pytest.mark.parametrize("number", [0, 5, 0.0, 0.5])
def test_truth_is_a_decision(number: float) -> None:
    trace = Trace()
    assert bool(traced_number(number, None, trace)) is bool(number)
    assert trace.decided == [(operator.ne, (number, 0))]


@pytest.mark.parametrize(
    "use",
    [int, float, hash, lambda number: {number: 1}, lambda number: number in {1, 2}, lambda number: number.bit_length()],
)
def test_use_that_cannot_be_followed_pins_the_number(use: Callable[[Any], Any]) -> None:
    trace = Trace()
    assert use(traced_number(6, None, trace)) == use(6)
    assert (operator.eq, (6, 6)) in trace.decided


def test_result_of_a_conversion_is_plain() -> None:
    trace = Trace()
    assert type(int(traced_number(6, None, trace))) is int
    assert type(float(traced_number(6, None, trace))) is float
    assert type(int(traced_number(6.5, None, trace))) is int


def test_quotient_and_remainder_together_are_both_followed() -> None:
    trace = Trace()
    assert divmod(traced_number(7, None, trace), 2) == divmod(7, 2)
    assert [function for function, _ in trace.computed] == [operator.floordiv, operator.mod]
    trace = Trace()
    assert tuple(map(plain_number, divmod(7, traced_number(2, None, trace)))) == divmod(7, 2)


def test_outside_its_trace_a_number_is_a_plain_one() -> None:
    trace = Trace()
    number = traced_number(6, None, trace)
    trace.recording = False
    assert type(number + 1) is int
    assert number == 6
    assert hash(number) == hash(6)
    assert trace.computed == trace.decided == []


@pytest.mark.parametrize("number", [6, 2.5])
def test_copies_and_pickles_are_plain_numbers(number: float) -> None:
    trace = Trace()
    traced = traced_number(number, None, trace)
    assert copy.deepcopy([traced])[0] is copy.copy(traced) is traced  # in its own trace it stays what it is
    trace.recording = False
    for twin in (copy.copy(traced), copy.deepcopy([traced])[0], plain_number(traced)):
        assert type(twin) is type(number)
        assert twin == number
    loaded = pickle.loads(pickle.dumps(traced_number(number, None, Trace())))
    assert type(loaded) is type(number)


def test_torch_takes_a_traced_number_wherever_it_takes_a_plain_one() -> None:
    trace = Trace()
    two, half = traced_number(2, None, trace), traced_number(0.5, None, trace)
    assert torch.ones(two, 3).shape == (2, 3)
    assert torch.equal(torch.ones(2) * half, torch.full((2,), 0.5))
    assert torch.ones(4).view(two, -1).shape == (2, 2)
    assert list(range(two)) == [0, 1]
    assert [1, 2, 3][two] == 3


def test_zero_division_is_the_plain_error() -> None:
    with pytest.raises(ZeroDivisionError):
        _ = traced_number(1, None, Trace()) // 0


def test_code_in_c_sees_another_value_of_a_disguised_number() -> None:
    trace = Trace()
    six, half = (traced_number(value, None, trace, disguise_as_larger(value)) for value in (6, 0.5))
    assert len([0] * six) == 6 + 10_081
    assert 0.5 * six == 3 + 10_081 / 2
    assert plain_number(six + 1) == 7
    assert six < 7
    assert plain_numbers((six, [slice(six)], {"half": half}, torch.Size([six]))) == (
        6, [slice(6)], {"half": 0.5}, torch.Size([6]),
    )  # fmt: skip
    with pytest.raises(Diverged):
        hash(six)


@pytest.mark.parametrize(
    "number",
    [
        lambda x: 2 if x.shape[0].__class__ is int else 3,
        lambda x: 2 if x.max().item().__class__ is float else 3,
        lambda x: {int: 2, float: 3}.get(x.shape[0].__class__, 5),
        lambda x: 2 if x.shape[0].__class__.__name__ == "int" else 3,
    ],
)
def test_class_of_a_number_is_that_of_a_plain_one(number: Callable[[torch.Tensor], int]) -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * number(x)

    x = torch.rand(3, 4)
    assert torch.equal(featx.trace(Model(), torch.rand(2, 4))(x), x * 2)
