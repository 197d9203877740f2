"""Caches outside the modules of a model hold no tensor of a trace afterwards."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import featx

TABLE: dict[int, torch.Tensor] = {}
KEPT: list[torch.Tensor] = []


@functools.lru_cache
def positions(length: int) -> torch.Tensor:
    return torch.arange(length).float()


class Cached(nn.Module):
    own: dict[int, torch.Tensor] = {}

    def __init__(self, look_up: Callable[[Any, int], torch.Tensor]) -> None:
        super().__init__()
        self.look_up = look_up

    @functools.lru_cache(maxsize=8)  # noqa: B019 - what models do
    def table(self, length: int) -> torch.Tensor:
        return torch.arange(length).float()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.look_up(self, x.shape[1])


def in_a_dict(model: Any, length: int) -> torch.Tensor:
    if length not in TABLE:
        TABLE[length] = torch.arange(length).float()
    return TABLE[length]


def in_a_class(model: Any, length: int) -> torch.Tensor:
    if length not in model.own:
        model.own[length] = torch.arange(length).float()
    return model.own[length]


def in_a_list(model: Any, length: int) -> torch.Tensor:
    KEPT.append(torch.arange(length).float())
    return KEPT[-1]


LOOKS: dict[str, Callable[[Any, int], torch.Tensor]] = {
    "function": lambda model, length: positions(length),
    "method": lambda model, length: model.table(length),
    "dict": in_a_dict,
    "class": in_a_class,
    "list": in_a_list,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOKS)
def test_model_runs_as_before_after_traces_and_after_traces_of_traces(name: str) -> None:
    model = Cached(LOOKS[name])
    for length in (3, 5, 3):
        x = torch.rand(2, length)
        traced = featx.trace(model, x)
        assert torch.equal(traced(x), x + torch.arange(length))
        assert torch.equal(model(x), x + torch.arange(length))


def test_model_with_a_property_is_traced() -> None:
    class Owner(nn.Module):
        @property
        def scale(self) -> float:
            return 2.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

    x = torch.rand(3)
    assert torch.equal(featx.trace(Owner(), x)(x), x * 2)


def test_list_that_forward_grows_and_counts_is_refused() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[int] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen.append(x.shape[0])
            return x + len(self.seen)

    model = Counting()
    with pytest.raises(featx.TraceError, match="other operations in a second call"):
        featx.trace(model, torch.rand(3))
    assert model.seen == []


@functools.lru_cache
def hidden_table(rows: int, columns: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return torch.arange(columns).float(), {"rows": torch.arange(rows).float()}


# Reached through an object, so that no global name of a file of the model leads to it.
HIDDEN = SimpleNamespace(table=hidden_table)
del hidden_table


def test_cached_function_that_no_name_leads_to_keeps_nothing_of_a_trace() -> None:
    def look_up(model: Any, length: int) -> torch.Tensor:
        columns, rest = HIDDEN.table(3, length)
        return columns + rest["rows"].sum()

    model, x = Cached(look_up), torch.ones(2, 4)
    traced = featx.trace(model, x)
    assert torch.equal(model(x), x + torch.arange(4) + 3)
    assert torch.equal(traced(x), model(x))


class Listener(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.heard: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.heard.append(record.getMessage())


LOGGER: Any = pytest.importorskip("transformers.utils.logging").get_logger("transformers.of_this_test")


class Warns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        LOGGER.warning_once("a slow path is taken")
        return self.linear(x) / x.shape[1]


def test_a_warning_that_is_said_once_is_said_once() -> None:
    listener = Listener()
    LOGGER.addHandler(listener)
    try:
        featx.create_feature_extractor(Warns(), ["linear"], example_inputs=torch.randn(2, 4))
    finally:
        LOGGER.removeHandler(listener)
    assert listener.heard == ["a slow path is taken"]


@functools.lru_cache
def kept_zeros(length: int) -> torch.Tensor:
    return torch.zeros(length)


@functools.lru_cache
def kept_steps(length: int) -> Iterator[int]:
    return iter(range(1, 9))


@functools.lru_cache
def kept_object(name: str) -> object:
    return SimpleNamespace(name=name)


def written(model: Any, length: int) -> torch.Tensor:
    table = kept_zeros(length)
    table += 1
    return table


@pytest.mark.parametrize(
    ("look_up", "reason"),
    [(written, "writes a tensor"), (lambda model, length: torch.ones(length) * next(kept_steps(length)), "iterator")],
)
def test_what_a_cached_function_has_returned_must_be_the_same_in_the_next_call(look_up: Any, reason: str) -> None:
    with pytest.raises(featx.TraceError, match=reason):
        featx.trace(Cached(look_up), torch.ones(2, 4))


def test_a_cached_function_returns_the_same_object_for_the_same_arguments() -> None:
    def look_up(model: Any, length: int) -> torch.Tensor:
        return torch.ones(length) * (3 if kept_object("a") is kept_object("a") else 5)

    model, x = Cached(look_up), torch.ones(2, 4)
    assert torch.equal(featx.trace(model, x)(x), model(x))


@functools.lru_cache
def filled(value: float) -> torch.Tensor:
    return torch.full((2, 4), value)


def test_a_cached_function_tells_an_int_from_an_equal_float() -> None:
    def look_up(model: Any, length: int) -> torch.Tensor:
        return filled(1) // 2 + torch.full_like(filled(1.0), 0.5)

    model, x = Cached(look_up), torch.ones(2, 4)
    expected = model(x)
    filled.cache_clear()
    assert torch.equal(featx.trace(model, x)(x), expected)


class Looks(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + positions(x.shape[1])


@pytest.mark.parametrize("is_made_there", [False, True])
def test_a_table_of_a_cached_function_in_inference_mode(is_made_there: bool) -> None:
    positions.cache_clear()
    model, x = Looks().eval(), torch.rand(2, 3)
    with torch.inference_mode(is_made_there):
        extractor = featx.create_feature_extractor(model, ["add"], example_inputs=x)
    for enabled in (True, False):
        with torch.inference_mode(enabled):
            for value in (x, torch.rand(1, 5)):
                assert torch.equal(extractor(value)["add"], value + torch.arange(value.shape[1]).float())
    positions.cache_clear()
