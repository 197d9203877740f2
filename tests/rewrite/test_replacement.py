"""A replacement returns what the pattern returns, value by value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peer import x

import featx

Function = Callable[..., Any]


def both(x: Any) -> Any:
    return torch.sigmoid(x), torch.relu(x)


def model(x: Any) -> Any:
    return torch.sigmoid(x) - torch.relu(x)


@pytest.mark.parametrize(
    ("pattern", "replacement"),
    [
        (both, lambda x: [torch.exp(x), torch.abs(x)]),
        (lambda x: {"one": torch.sigmoid(x), "two": torch.relu(x)}, lambda x: {"a": torch.exp(x), "b": torch.abs(x)}),
        (lambda x: (torch.sigmoid(x), None, torch.relu(x)), lambda x: (torch.exp(x), None, torch.abs(x))),
        (lambda x: (torch.sigmoid(x), (torch.relu(x),)), lambda x: (torch.exp(x), torch.abs(x))),
        (lambda x: (*both(x), x), lambda x: (torch.exp(x), torch.abs(x), x)),
    ],
)
def test_outputs_pair_up_in_order_however_they_are_nested(pattern: Function, replacement: Function) -> None:
    module = featx.symbolic_trace(model)
    assert len(featx.replace_pattern(module, pattern, replacement)) == 1
    assert torch.equal(module(x), torch.exp(x) - torch.abs(x))


def twice(x: Any) -> Any:
    value = torch.relu(x)
    return value, value


@pytest.mark.parametrize("replacement", [lambda x: torch.abs(x), lambda x: (torch.abs(x),) * 1])
def test_value_that_is_returned_twice_counts_once_as_in_torch_fx(replacement: Function) -> None:
    module = featx.symbolic_trace(lambda x: torch.relu(x) + 1)
    assert len(featx.replace_pattern(module, twice, replacement)) == 1
    assert torch.equal(module(x), torch.abs(x) + 1)


def two_values(x: Any) -> Any:
    return torch.abs(x), torch.exp(x)


@pytest.mark.parametrize(
    ("pattern", "replacement", "message"),
    [
        (twice, two_values, "returns 'relu' twice, and the replacement 'abs_1' and 'exp'"),
        (both, lambda x: torch.abs(x), r"returns \(sigmoid, relu\) and the replacement \(abs_1\)"),
        (lambda x: (*both(x), x), lambda x: (*both(x), torch.neg(x)), r"returns its input 'x', .* \('neg'\)"),
        (lambda x, y: (torch.relu(x) + y, x), lambda x, y: (x, y), r"returns its input 'x', .* \('y'\)"),
    ],
)
def test_outputs_that_do_not_pair_up_are_refused(pattern: Function, replacement: Function, message: str) -> None:
    with pytest.raises(featx.PatternError, match=message):
        featx.replace_pattern(featx.symbolic_trace(model), pattern, replacement)


def test_input_that_the_pattern_returns_is_left_alone() -> None:
    module = featx.symbolic_trace(lambda x: torch.relu(x.neg()) + x.neg().abs())
    featx.replace_pattern(module, lambda x: (torch.relu(x), x), lambda x: (torch.abs(x), x))
    assert torch.equal(module(x), torch.abs(-x) + torch.abs(-x))
