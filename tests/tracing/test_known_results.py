"""KnownResults: a call that is known gives what it would give, and what does more than that runs each time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from layouts import form, forms, on_meta
from torch.nn import functional

from featx.tracing.stand_ins.known_results import KnownResults, key_of_call


def ask(results: KnownResults, function: Callable[..., Any], *args: Any, **kwargs: Any) -> torch.Tensor | None:
    return results.get(key_of_call(function, args, kwargs))


def run(results: KnownResults, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    inputs = [each for each in args if isinstance(each, torch.Tensor)]
    return results.run(key_of_call(function, args, kwargs), lambda: function(*args, **kwargs), inputs)


CALLS: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
    (functional.gelu, ()), (torch.mul, (2.0,)), (torch.softmax, (-1,)), (torch.gt, (0,)), (torch.sum, (0,)),
    (functional.layer_norm, ((4,),)), (torch.clamp, (0.0, 1.0)), (torch.Tensor.to, (torch.float16,)),
    (functional.linear, (torch.empty(5, 4, device="meta"), torch.empty(5, device="meta"))),  # a view of what it makes
]  # fmt: skip


@pytest.mark.parametrize(("function", "rest"), CALLS, ids=lambda value: getattr(value, "__name__", ""))
def test_what_is_known_has_the_form_of_what_the_function_gives(function: Callable[..., Any], rest: Any) -> None:
    results = KnownResults()
    for x in forms((2, 3, 4), torch.float32):
        assert ask(results, function, on_meta(x), *rest) is None
        expected = run(results, function, on_meta(x), *rest)
        found = ask(results, function, on_meta(x), *rest)
        assert found is not None
        assert form(found) == form(expected)
        results = KnownResults()


X = torch.empty(2, 3, 4, device="meta")


@pytest.mark.parametrize(
    "call",
    [
        lambda results: run(results, torch.Tensor.add_, X, 1),
        lambda results: run(results, functional.relu, X, True),
        lambda results: run(results, functional.dropout, X, 0.5, False),
        lambda results: run(results, torch.Tensor.view, X, 24),
        lambda results: run(results, torch.Tensor.contiguous, X),
        lambda results: run(results, torch.Tensor.split, X, 1),
        lambda results: run(results, torch.Tensor.size, X),
    ],
)
def test_writes_views_and_other_results_are_not_remembered(call: Callable[[KnownResults], Any]) -> None:
    results = KnownResults()
    call(results)
    assert not any(results._known.values())


def test_other_options_numbers_and_dtypes_are_other_calls() -> None:
    results = KnownResults()
    run(results, torch.mul, X, 2)
    assert ask(results, torch.mul, X, 2) is not None
    assert ask(results, torch.mul, X, 2.0) is None
    assert ask(results, torch.mul, X.transpose(0, 1), 2) is None
    assert ask(results, torch.mul, X.half(), 2) is None
    assert ask(results, torch.sum, X, dim=(0,)) is None


def test_a_history_is_known_too() -> None:
    results = KnownResults()
    x = X.clone().requires_grad_()
    run(results, torch.mul, x, 2)
    found = ask(results, torch.mul, x, 2)
    assert found is not None
    assert found.requires_grad
    assert not found.is_leaf
    with torch.no_grad():
        assert ask(results, torch.mul, x, 2) is None


def test_what_is_not_known_by_its_arguments_has_no_key() -> None:
    assert key_of_call(torch.mul, (X, torch.eye(2).to_sparse()), {}) is None
    assert key_of_call(torch.mul, (X.as_subclass(type("Mine", (torch.Tensor,), {})), 2), {}) is None
    assert key_of_call(torch.mul, (X, object()), {}) is None
