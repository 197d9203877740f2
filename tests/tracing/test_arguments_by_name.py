"""Calls of torch that give their first argument by name: `torch.relu_(input=x)`, `torch.equal(input=x, other=y)`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import featx
from featx.ir.effects import Effects

X = torch.linspace(-1, 1, 4)


class Clamp(nn.Module):
    """Writes a value by a call that names it, and returns nothing of the call."""

    def __init__(self, write: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        before = y + 1
        self.write(y)
        return before * (y + 1)


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "input": lambda y: torch.clamp_(input=y, min=0.5),
    "after another": lambda y: torch.clamp_(min=0.5, input=y),
    "method": lambda y: y.clamp_(min=0.5),
    "init": lambda y: nn.init.constant_(tensor=y, val=3.0),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_what_is_written_by_name_stays_in_a_symbolic_graph(write: Callable[[Tensor], Any]) -> None:
    model = Clamp(write).eval()
    traced = featx.symbolic_trace(model)
    traced.graph.eliminate_dead_code()
    featx.passes.eliminate_common_subexpressions(traced)
    traced.recompile()
    assert torch.equal(traced(X), model(X))
    assert torch.equal(featx.trace(model, X)(X), model(X))


FOREIGN = torch.full((4,), -1.0)


class WritesForeign(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        torch.relu_(input=FOREIGN)
        return x + 1


def test_a_tensor_of_the_file_that_is_written_by_name_is_left_alone() -> None:
    with pytest.raises(featx.TraceError, match="relu_"):
        featx.trace(WritesForeign().eval(), X)
    assert torch.equal(FOREIGN, torch.full((4,), -1.0))


class Decides(nn.Module):
    def __init__(self, ask: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.ask = ask
        self.register_buffer("other", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if self.ask(x, self.other) else x * 3  # type: ignore[arg-type]


QUESTIONS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "tolerance": lambda x, other: torch.allclose(x, other, atol=1.5),
    "equal": lambda x, other: torch.equal(input=x, other=other),
    "method": lambda x, other: x.equal(other=other),
    "nonzero": lambda x, other: torch.is_nonzero(input=x.sum() - other.sum()),
}


@pytest.mark.parametrize("ask", QUESTIONS.values(), ids=QUESTIONS)
def test_decisions_hold_with_all_their_arguments(ask: Callable[[Tensor, Tensor], Any]) -> None:
    model = Decides(ask).eval()
    answers = [bool(ask(x, torch.zeros(4))) for x in (X + 1, torch.zeros(4), X + 100)]
    assert len(set(answers)) == 2
    traced = featx.trace(model, X + 1)
    for x, answer in zip((X + 1, torch.zeros(4), X + 100), answers, strict=True):
        if answer is answers[0]:
            assert torch.equal(traced(x), model(x))
        else:
            with pytest.raises(featx.SpecializationError):
                traced(x)


class Halves(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        first, second = torch.unsafe_chunk(input=x, chunks=2)
        return first + second


def test_a_split_by_name_is_traced() -> None:
    model = Halves().eval()
    assert torch.equal(featx.trace(model, X)(X), model(X))


@featx.wrap
def bump(first: Tensor, second: Tensor, third: Tensor) -> Tensor:
    third.add_(1)
    return first + second


class Bumped(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        one, two, three = x + 1, x + 1, x * 3
        bump(one, two, three)
        return three * 1


def test_inputs_of_a_measured_call_become_one() -> None:
    """What the call was seen to write is still that input when two others have become one."""
    graph = featx.trace(Bumped().eval(), X).graph
    nodes = {node.name: node for node in graph.nodes}
    nodes["add_1"].replace_all_uses_with(nodes["add"])
    assert [node.name for node in Effects(graph).of(nodes["bump"]).writes] == ["mul"]
