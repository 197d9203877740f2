"""C code that reads a size without a word: the graph does not hold where that read something else."""

from __future__ import annotations

import copy
import fractions
import itertools
import json
import operator
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import featx

STEPS = [1.0] * 64 + [5.0] * 500


class Reading(nn.Module):
    def __init__(self, function: Callable[[Tensor, Any], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, x.shape[1])


READERS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "a loop over chunks": lambda x, n: torch.cat([x[:, i : i + 64] * 2 for i in range(0, n, 64)], 1),
    "a float before it": lambda x, n: x * int(0.02 * n),
    "a float that decides": lambda x, n: x * (2 if 0.5 * n > 32 else 1),
    "numel of a size that is kept": lambda x, n: x * (torch.Size(x.shape[1:]).numel() // 64),
    "real": lambda x, n: x * (n.real // 64),
    "numerator": lambda x, n: x * (n.numerator // 64),
    "conjugate": lambda x, n: x * (n.conjugate() // 64),
    "an index": lambda x, n: x * (operator.index(n) // 64),
    "a place in a list": lambda x, n: x * STEPS[n],
    "a slice of a list": lambda x, n: x * sum(STEPS[:n]),
    "a repeated list": lambda x, n: x * (len([0] * n) // 64),
    "numpy": lambda x, n: x + np.zeros(n // 64 + 1).size,
    "a fraction": lambda x, n: x * (fractions.Fraction(n, 64).__floor__()),
    "json": lambda x, n: x * len(json.dumps([n])),
    "a method of int": lambda x, n: x * int.__floordiv__(n, 64),
    "a power with a modulus": lambda x, n: x * pow(n, 1, 64),
    "a mean": lambda x, n: x * statistics.mean([n, n]),
    "itertools": lambda x, n: x * len(list(itertools.islice(STEPS, n // 64))),
}
FOLLOWED: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "copies": lambda x, n: x * (copy.copy(n) + copy.deepcopy([n])[0] + +n),
    "builtins": lambda x, n: x * (max(min(n // 64, 5), 1) * sum([n, n]) + divmod(n, 3)[1] + round(n / 3) + abs(-n)),
    "factories": lambda x, n: torch.zeros(x.shape[0], n) + x + torch.arange(n) + torch.full((n,), x.shape[0]),
    "numel of a shape": lambda x, n: x * (x.shape[1:].numel() // 64 + x.size().numel()) + x.shape[:-1][0:].numel(),
    "nested arguments": lambda x, n: nn.functional.pad(x, (0, 64 - n % 64))[..., : n - 1].new_ones((n, 2)),
    "shapes": lambda x, n: x.reshape(*x.shape[:-1], n // 2, 2).expand(x.shape[0], n // 2, 2).sum(-1),
}


@pytest.mark.parametrize("name", READERS)
def test_size_that_is_read_unseen_is_right_or_refused(name: str) -> None:
    model = Reading(READERS[name])
    traced = featx.trace(model, torch.ones(2, 8))
    refused = 0
    for size in (8, 16, 70, 200):
        x = torch.rand(3, size)
        try:
            assert torch.equal(traced(x), model(x))
        except featx.SpecializationError:
            refused += 1
    assert 2 <= refused <= 3  # the two that are larger than 64, at least, and never the size of the example


# Decisions on what C code made of a size: for the example's 20, and for larger sizes, they are as for no smaller one.
DECISIONS: dict[str, Callable[[Tensor, Any], bool]] = {
    "a float ahead": lambda x, n: 2.0 * n > 30,
    "a float divided": lambda x, n: 30.0 / n < 2,
    "floats": lambda x, n: 1.0 * n * x.shape[0] > 30,
    "a float's remainder": lambda x, n: divmod(30.0, n)[0] < 2,
    "a sum with a float": lambda x, n: sum([0.5, n]) > 15,
    "numpy": lambda x, n: bool(np.prod(x.shape) > 30),
    "a repeated list": lambda x, n: len([0] * n) > 15,
    "a fraction": lambda x, n: fractions.Fraction(n, 3) > 5,
    "an index": lambda x, n: operator.index(n) > 15,
    "numel": lambda x, n: x.shape.numel() > 35,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DECISIONS)
def test_decision_that_is_another_one_for_smaller_sizes_is_not_taken_for_theirs(name: str) -> None:
    decide = DECISIONS[name]
    model = Reading(lambda x, n: x.relu() if decide(x, n) else x.sigmoid())
    traced = featx.trace(model, torch.ones(2, 20))
    assert torch.equal(traced(-torch.ones(2, 20)), torch.zeros(2, 20))
    for size in (1, 3, 10):
        with pytest.raises(featx.SpecializationError):
            traced(torch.ones(2, size))


@pytest.mark.parametrize("divisor", range(2, 11))
@pytest.mark.parametrize("size", [12, 15, 20])
def test_remainder_that_C_code_takes_is_told_from_that_of_other_sizes(size: int, divisor: int) -> None:
    model = Reading(lambda x, n: x * (2 if operator.index(n) % divisor == size % divisor else 3))
    traced = featx.trace(model, torch.ones(2, size))
    with pytest.raises(featx.SpecializationError):
        traced(torch.ones(2, size + 1))


@pytest.mark.parametrize("name", FOLLOWED)
def test_size_that_is_followed_stays_free(name: str) -> None:
    model = Reading(FOLLOWED[name])
    traced = featx.trace(model, torch.ones(2, 68))
    for size in (68, 70, 94):
        x = torch.rand(3, size)
        assert torch.equal(traced(x), model(x))


def test_range_is_still_a_type_for_the_model() -> None:
    def function(x: Tensor, n: Any) -> Tensor:
        return x * (2 if isinstance(range(3), range) and list(range(2)) == [0, 1] else 3)

    assert torch.equal(featx.trace(Reading(function), torch.ones(2, 4))(torch.ones(3, 9)), 2 * torch.ones(3, 9))


def test_question_whether_a_shape_is_empty_leaves_other_sizes_free() -> None:
    model = Reading(lambda x, n: x.relu() if x.shape.numel() == 0 or x.size()[1:].numel() == 0 else x.sigmoid())
    traced = featx.trace(model, torch.ones(2, 8))
    for size in (1, 8, 300):
        x = torch.rand(5, size)
        assert torch.equal(traced(x), model(x))
    for shape in ((0, 8), (2, 0)):
        with pytest.raises(featx.SpecializationError):
            traced(torch.rand(shape))


def test_branch_on_the_number_of_elements_that_a_smaller_shape_does_not_take() -> None:
    model = Reading(lambda x, n: x.relu() if x.shape.numel() > 100 else x.sigmoid())
    traced = featx.trace(model, torch.ones(20, 8))
    assert torch.equal(traced(-torch.ones(20, 8)), torch.zeros(20, 8))
    with pytest.raises(featx.SpecializationError):
        traced(torch.rand(3, 8))
