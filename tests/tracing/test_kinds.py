"""kinds: of which type the value of a node is, where that is certain."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import featx
from featx.tracing.nodes.value_types import value_type_of


def kind_of_result(function: Callable[[torch.Tensor], Any], root: nn.Module | None = None) -> type | None:
    graph = featx.Graph()
    x = featx.Proxy(graph.placeholder("x", torch.Tensor))
    result = function(x)  # type: ignore[arg-type]
    return value_type_of(result.node, root)


CERTAIN: list[Callable[[Any], Any]] = [
    lambda x: x + 1,
    lambda x: 2 - x,
    lambda x: x @ x.T,
    lambda x: -x,
    lambda x: ~(x > 0),
    lambda x: abs(x),
    lambda x: x == 3,
    lambda x: x[0],
    lambda x: x[..., None],
    lambda x: x.T,
    lambda x: x.data,
    lambda x: x.relu(),
    lambda x: x.flatten(1),
    lambda x: x.new_zeros(2),
    lambda x: x.mean(dim=0),
    lambda x: torch.cat([x, x]),
    lambda x: torch.zeros_like(x),
    lambda x: functional.relu(x),
    lambda x: functional.pad(x, (1, 1)),
    lambda x: functional.scaled_dot_product_attention(x, x, x),
    lambda x: x.shape,
    lambda x: x.size(),
    lambda x: x.shape[1:],
    lambda x: x.shape[0],
    lambda x: x.size(0),
    lambda x: x.size(dim=1),
    lambda x: x.dim(),
    lambda x: x.ndim,
    lambda x: x.numel(),
    lambda x: x.shape[0] * 2 + 1,
    lambda x: x.shape[0] // 2,
    lambda x: x.shape[0] / 2,
    lambda x: x.shape[0] * 0.5,
    lambda x: -x.shape[0],
    lambda x: x.shape[0] == x.shape[1],
    lambda x: x.shape[0] < 7.5,
    lambda x: x + x.shape[0],
]


@pytest.mark.parametrize("function", CERTAIN)
def test_certain_kind_is_the_type_of_the_real_value(function: Callable[[Any], Any]) -> None:
    assert kind_of_result(function) is type(function(torch.ones(4, 4)))


UNCERTAIN: list[Callable[[Any], Any]] = [
    lambda x: x.max(0),
    lambda x: torch.max(x, 0),
    lambda x: x.split(2),
    lambda x: x.unbind(),
    lambda x: x.item(),
    lambda x: x.stride(),
    lambda x: x.grad,
    lambda x: x.unknown_method(),
    lambda x: x.unknown_attribute,
    lambda x: x.max(0)[0],
    lambda x: torch.where(x),
    lambda x: x.item() + 1,
]


@pytest.mark.parametrize("function", UNCERTAIN)
def test_kind_that_is_not_certain_is_none(function: Callable[[Any], Any]) -> None:
    assert kind_of_result(function) is None


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.nonzero(as_tuple=True),
        lambda x: torch.nonzero(x, as_tuple=True),
        lambda x: functional.max_pool2d(x[None], 2, None, 0, 1, False, True),
        lambda x: functional.max_pool2d(x[None], 2, return_indices=True),
        lambda x: functional.adaptive_max_pool1d(x, 2, True),
    ],
)
def test_function_that_returns_a_tuple_on_request_is_no_tensor(function: Callable[[Any], Any]) -> None:
    assert kind_of_result(function) is not torch.Tensor


def test_input_is_a_tensor_only_where_it_is_annotated() -> None:
    graph = featx.Graph()
    assert value_type_of(graph.placeholder("a", torch.Tensor), None) is torch.Tensor
    assert value_type_of(graph.placeholder("b", "Tensor"), None) is torch.Tensor
    assert value_type_of(graph.placeholder("c", torch.Tensor | None), None) is None
    assert value_type_of(graph.placeholder("d"), None) is None


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.number = 3
        self.conv = nn.Conv2d(3, 3, 1)
        self.pool = nn.MaxPool2d(2)
        self.pool_with_indices = nn.MaxPool2d(2, return_indices=True)
        self.attention = nn.MultiheadAttention(4, 1)
        self.lstm = nn.LSTM(3, 3)
        self.own = nn.Sequential(nn.ReLU())


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("conv", torch.Tensor),
        ("pool", torch.Tensor),
        ("pool_with_indices", None),
        ("attention", None),
        ("lstm", None),
        ("own", None),
        ("missing", None),
    ],
)
def test_module_is_known_to_return_a_tensor_by_its_class(path: str, kind: type | None) -> None:
    graph = featx.Graph()
    x = graph.placeholder("x")
    assert value_type_of(graph.call_module(path, (x,)), Parts()) is kind


def test_attribute_of_the_model_is_a_tensor_where_it_is_one() -> None:
    graph = featx.Graph()
    assert value_type_of(graph.get_attr("weight"), Parts()) is nn.Parameter
    assert value_type_of(graph.get_attr("number"), Parts()) is None
    assert value_type_of(graph.get_attr("missing"), None) is None


def test_math_function_gives_the_number_type_it_documents() -> None:
    graph = featx.Graph()
    x = graph.placeholder("x")
    assert value_type_of(graph.call_function(math.ceil, (x,)), None) is int
    assert value_type_of(graph.call_function(math.sqrt, (x,)), None) is float


def test_function_of_the_user_is_not_known() -> None:
    graph = featx.Graph()
    assert value_type_of(graph.call_function(kind_of_result, (graph.placeholder("x"),)), None) is None


def test_long_chain_of_sums_with_itself_is_answered() -> None:
    # One call deeper for each sum ends at Python's recursion limit; two questions for each sum would never end.
    def chain(x: Any) -> Any:
        for _ in range(3000):
            x = x + x
        return x

    assert kind_of_result(chain) is torch.Tensor
