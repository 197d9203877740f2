"""Replacing gives what torch.fx gives: matches, graphs to the last name, and values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx
from peer import absolute, neg_relu, negative, relu, rewritten_alike, x, y, z
from torch import nn
from torch.nn import functional

import featx


@featx.wrap
@torch.fx.wrap
def fused(a: Any, b: Any, bias: Any) -> Any:
    result = functional.linear(a, b, bias)
    return result, result * a


CASES: dict[str, tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any], tuple[Any, ...], int]] = {
    "one call": (lambda x: torch.neg(x) * 2, negative, relu, (x,), 1),
    "the whole graph": (neg_relu, neg_relu, lambda x: torch.cat([x, x]), (x,), 1),
    "the pattern itself": (lambda x: neg_relu(x) + 1, neg_relu, neg_relu, (x,), 1),
    "nothing": (lambda x: torch.sigmoid(x), neg_relu, absolute, (x,), 0),
    "several": (
        lambda x, y: torch.cat([x, y]).sum() + torch.cat([y, x]).sum(),
        lambda x, y: torch.cat([x, y]),
        lambda x, y: torch.stack([x, y]),
        (x, y),
        2,
    ),
    "back to back": (lambda x: neg_relu(neg_relu(neg_relu(x))), neg_relu, lambda x: torch.exp(x), (x,), 3),
    "overlapping": (
        lambda x: torch.relu(torch.relu(torch.relu(x))),
        lambda x: torch.relu(torch.relu(x)),
        negative,
        (x,),
        1,
    ),
    "by its input": (lambda x: neg_relu(x) * 2, neg_relu, lambda x: x, (x,), 1),
    "back to back, by its input": (lambda x: neg_relu(neg_relu(x)), neg_relu, lambda x: x, (x,), 2),
    "with an unused input": (
        lambda x, y: torch.neg(x) + torch.relu(y),
        lambda x, y: torch.neg(x) + torch.relu(y),
        lambda x, y: torch.relu(x),
        (x, y),
        1,
    ),
    "a constant handed on": (lambda x: x.add(2), lambda x, n: x.add(n), lambda x, n: x * n, (x,), 1),
    "lists handed on": (
        lambda x: torch.reshape(torch.permute(x, [1, 0]), [9]),
        lambda x, order, shape: torch.reshape(torch.permute(x, order), shape),
        lambda x, order, shape: torch.permute(torch.reshape(x, shape), [0]),
        (x,),
        1,
    ),
    "two outputs": (
        lambda x: torch.sigmoid(x) + torch.relu(x),
        lambda x: (torch.sigmoid(x), torch.relu(x)),
        lambda x: (torch.exp(x), torch.abs(x)),
        (x,),
        1,
    ),
    "one value for two outputs": (
        lambda x, y: torch.sigmoid(x - y) * torch.relu(x - y).sum(),
        lambda x, y: torch.sigmoid(x - y),
        lambda x, y: torch.abs(y),
        (x, y),
        1,
    ),
    "an inner value as output": (
        lambda x, y: torch.sigmoid(y) * torch.relu(torch.sigmoid(x)) + x,
        lambda x: (torch.relu(torch.sigmoid(x)),),
        lambda x: (torch.abs(x),),
        (x, y),
        1,
    ),
    "methods": (
        lambda x: x.dequantize().sigmoid().to(torch.float16),
        lambda x: x.dequantize().sigmoid().to(torch.float16),
        lambda x: x,
        (x,),
        1,
    ),
    "arguments by name": (
        lambda x, y, z: functional.linear(x, y, bias=z[0]) * x,
        lambda x, y, z: functional.linear(x, y, bias=z),
        lambda x, y, z: torch.mm(x, y) + z,
        (x, y, z),
        1,
    ),
    "of which one is a false start": (
        lambda x, y: (torch.relu(x) * torch.sigmoid(y)).neg() + torch.relu(y) * torch.relu(x),
        lambda x, y: torch.relu(x) * torch.relu(y),
        lambda x, y: x - y,
        (x, y),
        1,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_replacement_of(name: str) -> None:
    model, pattern, replacement, inputs, count = CASES[name]
    assert len(rewritten_alike(model, pattern, replacement, *inputs)) == count


def test_results_are_named_as_torch_fx_names_them() -> None:
    found = featx.replace_pattern(featx.symbolic_trace(lambda x: neg_relu(x) + 1), neg_relu, absolute)
    assert str(found) == "[Match(anchor=neg, nodes_map={neg: neg, relu: relu, x: x})]"
    assert isinstance(found[0], featx.Match)


def test_values_returned_twice_are_replaced_by_one() -> None:
    def model(x: Any, y: Any) -> Any:
        difference = x - y
        return torch.sigmoid(difference) + torch.relu(difference)

    def pattern(x: Any, y: Any) -> Any:
        difference = x - y
        return torch.sigmoid(difference), torch.relu(difference), difference

    def replacement(x: Any, y: Any) -> Any:
        one, other = torch.exp(x), torch.abs(y)
        return other, other, one

    assert len(rewritten_alike(model, pattern, replacement, x, y)) == 1


def test_calls_that_return_several_values_replace_several() -> None:
    def model(x: Any, y: Any, z: Any) -> Any:
        result = functional.linear(x, y, bias=z)
        return result * x + result

    def pattern(a: Any, b: Any, bias: Any) -> Any:
        result = functional.linear(a, b, bias=bias)
        return result, result * a

    def replacement(a: Any, b: Any, bias: Any) -> Any:
        result, product = fused(a, b, bias)
        return result, product

    module = featx.symbolic_trace(model)
    assert len(featx.replace_pattern(module, pattern, replacement)) == 1
    assert torch.equal(module(x, y, z[0]), model(x, y, z[0]))
    assert len(module.graph.find_nodes(op="call_function", target=fused)) == 1


@pytest.mark.parametrize("form", [lambda f: f, featx.symbolic_trace, lambda f: featx.symbolic_trace(f).graph])
def test_pattern_and_replacement_may_be_functions_modules_or_graphs(form: Callable[[Any], Any]) -> None:
    class Absolute(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.abs(x)

    module = featx.symbolic_trace(lambda x: neg_relu(x) + 1)
    pattern, replacement = form(neg_relu), form(Absolute())
    texts = [str(graph) for graph in (pattern, replacement) if isinstance(graph, featx.Graph)]
    assert len(featx.replace_pattern(module, pattern, replacement)) == 1
    assert torch.equal(module(x), torch.abs(x) + 1)
    assert texts == [str(graph) for graph in (pattern, replacement) if isinstance(graph, featx.Graph)]
