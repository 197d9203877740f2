"""The checks that a graph makes of what Python decided on the example."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

import featx
from featx import SpecializationError
from featx.tracing.guards.guards import check_decision, check_form, check_size, form_of, require_mode


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (True, True),
        (3, 3),
        (float("nan"), float("nan")),
        ("a", "a"),
        (None, None),
        (torch.tensor(2), 2),
        ((1, 2), (1, 2)),
    ],
)
def test_same_decision_passes(value: Any, expected: Any) -> None:
    check_decision(value, expected, "it")


@pytest.mark.parametrize(
    ("value", "expected"),
    [(True, False), (3, 4), (1.0, float("nan")), ("a", "b"), (torch.tensor(2), 3), ((1,), (1, 2))],
)
def test_other_decision_raises_and_names_both_and_what_was_decided(value: Any, expected: Any) -> None:
    with pytest.raises(SpecializationError) as caught:
        check_decision(value, expected, "x > 3 at net.py:7")
    for part in ("x > 3 at net.py:7", repr(value), repr(expected), "trace again"):
        assert part in str(caught.value)


def test_long_values_are_cut_in_the_message() -> None:
    with pytest.raises(SpecializationError) as caught:
        check_decision("a" * 500, "b", "it")
    assert len(str(caught.value)) < 400


def test_size_is_compared_in_one_dimension_alone() -> None:
    check_size(torch.ones(2, 3), 1, 3, "x")
    check_size(torch.ones(9, 3), 1, 3, "x")
    with pytest.raises(SpecializationError, match=r"dimension 1 of x: the input has shape \(2, 3\), the example had 4"):
        check_size(torch.ones(2, 3), 1, 4, "x")


def test_missing_dimension_is_another_size() -> None:
    with pytest.raises(SpecializationError):
        check_size(torch.ones(2), 1, 2, "x")


X, Y = torch.ones(2), torch.ones(2, 3)


@pytest.mark.parametrize(
    ("one", "other"),
    [(X, Y), ([X], (X,)), ([X], [X, X]), ({"a": X}, {"b": X}), (X, None), (1, 1.0), (None, True), ([X, [Y]], [X, [X]])],
)
def test_other_nesting_is_refused(one: Any, other: Any) -> None:
    check_form(one, form_of(one), "it")
    with pytest.raises(SpecializationError, match="the form of it"):
        check_form(other, form_of(one), "it")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Y, torch.zeros(7, 1)),
        ([X], [X + 1]),
        ({"a": X}, {"a": X * 2}),
        ({"a": X}, OrderedDict(a=X)),
        (1, 2),
        (0.5, 1.5),
    ],
)
def test_same_nesting_passes_whatever_the_values(one: Any, other: Any) -> None:
    check_form(other, form_of(one), "it")


def test_graph_checks_first_that_its_module_is_in_the_mode() -> None:
    gm = featx.symbolic_trace(nn.ReLU())
    require_mode(gm.graph, True, "it was made so")
    assert [node.op for node in gm.graph.nodes][:3] == ["placeholder", "get_attr", "call_function"]
    gm(torch.ones(1))
    with pytest.raises(SpecializationError, match=r"train mode \(it was made so\): False now, True on the example"):
        gm.eval()(torch.ones(1))


def test_mode_is_checked_once() -> None:
    gm = featx.symbolic_trace(nn.ReLU())
    require_mode(gm.graph, True, "for one reason")
    before = str(gm.graph)
    require_mode(gm.graph, True, "for another one")
    assert str(gm.graph) == before
    require_mode(gm.graph, False, "for a third, which cannot hold with the first")
    with pytest.raises(SpecializationError):
        gm(torch.ones(1))


@pytest.mark.parametrize(
    ("given", "advice"),
    [(torch.rand(2, 3).numpy(), "torch.from_numpy"), ({"x": torch.rand(2, 3)}, "Give a tensor"), (None, "adaptive")],
    ids=["array", "dict", "nothing"],
)
def test_what_is_no_tensor_is_told_what_to_give(given: Any, advice: str) -> None:
    traced = featx.trace(nn.Linear(3, 4), torch.rand(2, 3))
    with pytest.raises(featx.SpecializationError, match=advice):
        traced(given)
