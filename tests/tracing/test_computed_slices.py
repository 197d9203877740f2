"""What counts as code that takes a part of something between two bounds which it computes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from featx.tracing.source.location import codes_in
from featx.tracing.source_uses.slices import has_computed_slices


def one_bound(items: list[int], a: int) -> Any:
    return items[a:], items[:a], items[1:a], items[-1:a], items[-3:-1], items[slice(-a, None)], items[slice(a)]


def first_ones(items: list[int], a: int) -> Any:
    return list(itertools.islice(items, a)), list(itertools.islice(items, a, None))


def part_of_a_tensor(items: Any, a: int, b: int) -> Any:
    return items[:, a:b]


def between(items: list[int], a: int, b: int) -> Any:
    return items[a:b]


def behind_a_sign(items: list[int], a: int, b: int) -> Any:
    return items[a:-b]


def inner_code(items: list[int], a: int, b: int) -> Any:
    return (lambda: items[a : a + b])()


def made(items: list[int], a: int, b: int) -> Any:
    return items[slice(a, b)]


def starred(items: list[int], bounds: tuple[int, int]) -> Any:
    return items[slice(*bounds)]


def passed_on(starts: list[int], ends: list[int]) -> Any:
    return [*map(slice, starts, ends)]


def by_iterator(items: list[int], a: int, b: int) -> Any:
    return list(itertools.islice(items, a, b))


def by_another_name(items: list[int], a: int, b: int) -> Any:
    from itertools import islice as part

    return list(part(items, a, b))


def in_comprehensions(rows: list[list[int]], a: int, b: int) -> Any:
    return [[row[a:b] for row in rows] for _ in rows], [row[0] for row in rows]


def test_code_of_a_comprehension_is_looked_up_as_that_of_a_function() -> None:
    inner = [code for code in codes_in(in_comprehensions.__code__) if code.co_name == "<listcomp>"]
    # Python 3.12 and newer make no code of these.
    assert sorted(has_computed_slices(code) for code in inner) == ([False, True, True] if inner else [])
    plain = (row[0] for row in [[1]])
    assert not has_computed_slices(plain.gi_code)


@pytest.mark.parametrize("function", [one_bound, first_ones, part_of_a_tensor])
def test_one_bound_is_seen_by_zero_and_large_numbers(function: Callable[..., Any]) -> None:
    assert not has_computed_slices(function.__code__)


@pytest.mark.parametrize(
    "function", [between, behind_a_sign, inner_code, made, starred, passed_on, by_iterator, by_another_name]
)
def test_two_bounds_are_found(function: Callable[..., Any]) -> None:
    assert has_computed_slices(function.__code__)


def test_code_without_source_may_have_them() -> None:
    scope: dict[str, Any] = {}
    exec("def unknown(items): return items[1:]", scope)
    assert has_computed_slices(scope["unknown"].__code__)
