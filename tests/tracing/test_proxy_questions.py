"""Proxy: questions that only a real value could answer are answered where the answer is sure, and refused elsewhere."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sources import run_source
from torch import nn
from torch.nn import functional

import featx

X = torch.tensor([[1.0, 2.0], [3.0, 4.0]])


def branch_on_module_result(x: torch.Tensor) -> torch.Tensor:
    y = functional.relu(x)
    if isinstance(y, torch.Tensor):
        return y + 1
    return y[0]


def branch_on_input(x: torch.Tensor) -> torch.Tensor:
    if isinstance(x, (list, tuple)):
        return x[0]
    return x + 1


def branch_on_size(x: torch.Tensor) -> torch.Tensor:
    size = x.shape[0]
    return x * size if isinstance(size, int) else x


def branch_over_several_lines(x: torch.Tensor) -> torch.Tensor:
    if isinstance(
        x,
        torch.Tensor,
    ):
        return x + 1
    return x - 1


def branch_in_match(x: torch.Tensor) -> torch.Tensor:
    match x:
        case torch.Tensor():
            return x + 1
        case _:
            return x - 1


def branch_on_is_tensor(x: torch.Tensor) -> torch.Tensor:
    return x + 1 if torch.is_tensor(x) else x - 1


@functools.singledispatch
def branch_by_dispatch(x: Any) -> Any:
    return x - 1


@branch_by_dispatch.register
def branch_of_tensors(x: torch.Tensor) -> torch.Tensor:
    return x + 1


@pytest.mark.parametrize(
    "function",
    [
        branch_on_module_result,
        branch_on_input,
        branch_on_size,
        branch_over_several_lines,
        branch_in_match,
        branch_on_is_tensor,
        branch_by_dispatch,
    ],
)
def test_isinstance_takes_the_branch_that_the_model_takes(function: Callable[[Any], Any]) -> None:
    try:
        traced = featx.symbolic_trace(function)
    except featx.ControlFlowError:
        return  # refused, which is not wrong
    assert torch.equal(traced(X), function(X))


@pytest.mark.parametrize("function", [branch_on_module_result, branch_on_input, branch_on_size])
def test_isinstance_is_answered_where_the_type_is_certain(function: Callable[[Any], Any]) -> None:
    assert torch.equal(featx.symbolic_trace(function)(X), function(X))


def test_isinstance_of_an_unknown_value_is_refused() -> None:
    def branch(x: Any) -> Any:
        return x[0] if isinstance(x, tuple) else x

    with pytest.raises(featx.ControlFlowError, match="isinstance"):
        featx.symbolic_trace(branch)


def test_isinstance_proxy_holds_in_the_tracer_itself() -> None:
    x = featx.Proxy(featx.Graph().placeholder("x", torch.Tensor))
    assert type(x) is featx.Proxy
    assert isinstance(x, torch.Tensor)


class AsksInHooks(featx.Tracer):
    """Asks in a generator expression, in a function of its own, and of parameters, as torch.fx's documentation does."""

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, nn.Parameter):
            return self.create_node("get_attr", next(name for name, each in self.root.named_parameters() if each is a))
        return super().create_arg(a)

    def call_module(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return super().call_module(module, forward, tuple(first_of(x) for x in args), kwargs)


def first_of(x: Any) -> Any:
    return x[0] if isinstance(x, (tuple, list)) else x


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale


def test_isinstance_proxy_holds_in_hooks_of_a_tracer() -> None:
    model, x = Scaled(), torch.rand(2, 4)
    graph = AsksInHooks().trace(model)
    assert [node.name for node in graph.nodes] == ["x", "linear", "scale", "mul", "output"]
    assert torch.equal(featx.GraphModule(model, graph)(x), model(x))


# -- what a trace cannot answer ----------------------------------------------------------------------------------------


class Refused(nn.Module):
    """Its child `inner` asks a traced value for what only a real one has."""

    def __init__(self, question: Callable[[Any], Any]) -> None:
        super().__init__()
        self.inner = Asking(question)

    def forward(self, x: Any) -> Any:
        return self.inner(x.sum())


class Asking(nn.Module):
    def __init__(self, question: Callable[[Any], Any]) -> None:
        super().__init__()
        self.question = question

    def forward(self, value: Any) -> Any:
        return self.question(value)


QUESTIONS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "if": (lambda value: 1 if value > 0 else 2, "value > 0"),
    "not": (lambda value: not value, "not value"),
    "and": (lambda value: value and 1, "value"),
    "len": (lambda value: len(value), "len(value)"),
    "int": (lambda value: int(value), "int(value)"),
    "float": (lambda value: float(value), "float(value)"),
    "range": (lambda value: list(range(value)), "range(value)"),
    "list index": (lambda value: [1, 2][value], "[1, 2][value]"),
    "loop": (lambda value: [item for item in value], "value"),  # noqa: C416
    "star": (lambda value: max(*value), "max(*value)"),
    "list": (lambda value: list(value), "list(value)"),
    "double star": (lambda value: dict(**value), "dict(**value)"),
    "in": (lambda value: 1 in value, "1 in value"),
    "dictionary key": (lambda value: value.update({value: 1}), "value.update({value: 1})"),
    "bool": (lambda value: bool(value), "bool(value)"),
    "isinstance": (lambda value: isinstance(value[0].grad, int), "isinstance(value[0].grad, int)"),
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_refusal_names_module_place_and_expression(name: str) -> None:
    question, expression = QUESTIONS[name]
    with pytest.raises(featx.ControlFlowError) as caught:
        featx.symbolic_trace(Refused(question))
    message = str(caught.value)
    assert "module 'inner' of Refused" in message
    assert f"{__file__}:{question.__code__.co_firstlineno}, in <lambda>" in message
    assert expression in message
    assert "concrete_args" in message or "featx.wrap" in message


def test_refusal_is_an_error_that_users_of_torch_fx_catch() -> None:
    with pytest.raises(ValueError, match="cannot trace") as caught:
        featx.symbolic_trace(lambda x: 1 if x else 2)
    assert isinstance(caught.value, (TypeError, featx.TraceError, featx.FeatxError))


def test_assert_in_the_model_is_recorded_and_checked_when_it_runs() -> None:
    namespace = run_source("def check(x):\n    assert x.shape[0] == 2, 'two rows'\n    return x + 1")
    traced = featx.symbolic_trace(namespace["check"])
    assert torch.equal(traced(X), X + 1)
    with pytest.raises(AssertionError):
        traced(X[:1])


def test_assert_of_a_tensor_is_recorded() -> None:
    namespace = run_source("def check(x):\n    assert (x > 0).all()\n    return x + 1")
    traced = featx.symbolic_trace(namespace["check"])
    assert torch.equal(traced(X), X + 1)
    with pytest.raises(AssertionError):
        traced(-X)
