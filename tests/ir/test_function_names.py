"""A user's function that is called like one of torch's, or has its name from functools.wraps, is not taken for it."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as everybody writes it
from torch import nn

import featx
from featx.ir.effects import Effects


def doubled_in_place(x: torch.Tensor, *_: Any) -> torch.Tensor:
    return x.mul_(2)


def called(name: str) -> Callable[..., Any]:
    """Return a function of this file with another name."""

    def function(x: torch.Tensor, *_: Any) -> torch.Tensor:
        return x.mul_(2)

    function.__name__ = function.__qualname__ = name
    return function


NAMES = ["manual_seed", "set_grad_enabled", "_enter_autocast", "_set_grad_enabled", "check_size", "relu", "getitem",
         "getattr", "clone_tensors", "contiguous", "split", "add", "_assert", "profiler"]  # fmt: skip
WRAPPED: list[Callable[..., Any]] = [
    torch.relu, F.relu, F.softmax, operator.add, operator.getitem, torch._assert, torch.manual_seed, torch.clone,
]  # fmt: skip


def _agrees(function: Callable[..., Any]) -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            first = x * 3
            second = function(first)
            return first + 0, second

    graph = featx.Graph()
    x = graph.placeholder("x")
    first = graph.call_function(operator.mul, (x, 3))
    second = graph.call_function(function, (first,))
    graph.output((graph.call_function(operator.add, (first, 0)), second))
    module = featx.GraphModule(nn.Module(), graph)
    assert Effects(graph).of(second).writes == (first,)
    featx.passes.eliminate_common_subexpressions(module)
    graph.eliminate_dead_code()
    expected = Model()(torch.ones(2))
    assert all(map(torch.equal, module(torch.ones(2)), expected))


@pytest.mark.parametrize("name", NAMES)
def test_function_with_a_name_of_torch_may_write(name: str) -> None:
    _agrees(called(name))


@pytest.mark.parametrize("wrapped", WRAPPED, ids=lambda function: function.__name__)
def test_function_that_wraps_one_of_torch_may_write(wrapped: Callable[..., Any]) -> None:
    _agrees(functools.wraps(wrapped)(doubled_in_place))


@pytest.mark.parametrize("wrapped", WRAPPED, ids=lambda function: function.__name__)
def test_object_that_wraps_a_function_of_torch_may_write(wrapped: Callable[..., Any]) -> None:
    class Doubling:
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return x.mul_(2)

    _agrees(functools.update_wrapper(Doubling(), wrapped))


def manual_seed(x: torch.Tensor) -> torch.Tensor:
    return x.mul_(2)


featx.wrap("manual_seed")


class Seeds(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = x * 3
        second = manual_seed(first)
        return first + 0, second


@pytest.mark.parametrize("tracer", ["symbolic", "example"])
def test_feature_that_such_a_function_overwrites_is_what_it_was(tracer: Any) -> None:
    example = {"example_inputs": torch.ones(2)} if tracer == "example" else {}
    extractor = featx.create_feature_extractor(Seeds(), {"mul": "first", "output": "out"}, tracer=tracer, **example)
    found = extractor(torch.ones(2))
    assert torch.equal(found["first"], torch.full((2,), 3.0))
    assert all(map(torch.equal, found["out"], Seeds()(torch.ones(2))))
