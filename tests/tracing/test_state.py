"""ModuleState: what forward changes on its modules during a trace is put back."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from random import uniform
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import featx
from featx.tracing.model_state.module_state import ModuleState

X = torch.ones(2, 3)


class Keeper(nn.Module):
    """Runs `change` on itself in forward, so that a trace meets it."""

    def __init__(self, change: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.change = change
        self.linear = nn.Linear(3, 3)
        self.register_buffer("count", torch.zeros(()))
        self.last: Any = None
        self.history: list[Any] = ["first"]
        self.empty: list[Any] = []
        self.cache: dict[Any, Any] = {"key": 1}
        self.seen: set[Any] = {1}
        self.steps = 0

    def forward(self, x: Any) -> Any:
        y = self.linear(x)
        self.change(self, y)
        return y


class Outer(nn.Module):
    def __init__(self, change: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.keeper = Keeper(change)

    def forward(self, x: Any) -> Any:
        return self.keeper(x) + 1


CHANGES: dict[str, Callable[[Any, Any], Any]] = {
    "attribute": lambda model, y: setattr(model, "last", y),
    "new attribute": lambda model, y: setattr(model, "output", y),
    "counter": lambda model, y: setattr(model, "steps", model.steps + 1),
    "deleted attribute": lambda model, y: delattr(model, "last"),
    "list": lambda model, y: model.history.append(y),
    "empty list": lambda model, y: model.empty.append(y),
    "replaced list": lambda model, y: setattr(model, "history", [y]),
    "dict": lambda model, y: model.cache.update(key=y),
    "new key": lambda model, y: model.cache.update(other=y),
    "set": lambda model, y: model.seen.add(2),
    "buffer in place": lambda model, y: model.count.add_(1),
    "training flag": lambda model, y: model.eval(),
}
# What a graph would repeat, so that the trace is refused.
REFUSED = {"counter": "changes the attribute 'steps'", "training flag": "puts '.*' into eval mode"}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", [Keeper, Outer])
def test_change_that_forward_makes_is_put_back(
    change: str, kind: Callable[..., nn.Module], snapshot: Callable[[nn.Module], Any]
) -> None:
    model = kind(CHANGES[change])
    before = snapshot(model)
    refusal = pytest.raises(featx.TraceError, match=REFUSED[change]) if change in REFUSED else contextlib.nullcontext()
    with refusal:
        featx.symbolic_trace(model)
    before.check()


@pytest.mark.parametrize("change", CHANGES)
def test_change_that_a_failing_forward_made_is_put_back(change: str, snapshot: Callable[[nn.Module], Any]) -> None:
    def change_and_fail(model: Any, y: Any) -> None:
        CHANGES[change](model, y)
        raise ZeroDivisionError

    model = Outer(change_and_fail)
    before = snapshot(model)
    with pytest.raises(ZeroDivisionError):
        featx.symbolic_trace(model)
    before.check()


def test_buffer_that_forward_registers_is_gone_after_the_trace(snapshot: Callable[[nn.Module], Any]) -> None:
    model = Outer(lambda model, y: model.register_buffer("mask", torch.ones(3), persistent=False))
    before = snapshot(model)
    with contextlib.suppress(featx.TraceError):
        featx.symbolic_trace(model)
    before.check()


@pytest.mark.parametrize("draw", [random.random, np.random.rand], ids=["random", "numpy"])
def test_forward_that_draws_outside_torch_is_refused_and_the_generator_is_as_before(draw: Callable[[], float]) -> None:
    before = random.getstate(), np.random.get_state()[2]
    name = "random.random" if draw is random.random else "np.random.rand"
    namespace: dict[str, Any] = {"random": random, "np": np}
    exec(f"def function(x):\n    return x * {name}()", namespace)
    with pytest.raises(featx.TraceError, match="random generator"):
        featx.symbolic_trace(namespace["function"])
    assert (random.getstate(), np.random.get_state()[2]) == before


def test_draw_of_forward_through_a_name_of_its_own_is_refused() -> None:
    with pytest.raises(featx.TraceError, match="random generator"):
        featx.symbolic_trace(lambda x: x * uniform(0, 1))


def test_restoring_an_unchanged_module_keeps_every_object() -> None:
    model = Keeper(lambda model, y: None)
    before = {name: id(value) for name, value in model.__dict__.items()}
    ModuleState(model).restore()
    assert {name: id(value) for name, value in model.__dict__.items()} == before


def test_buffers_that_were_rebound_are_known_and_put_back() -> None:
    model = Keeper(lambda model, y: None)
    model.register_buffer("other", torch.zeros(()))
    state = ModuleState(model)
    mine, theirs = torch.ones(()), torch.ones(())
    model.count, model.other = mine, theirs
    assert state.rebound_buffers(lambda value: value is mine) == {"count": mine}
    state.restore()
    assert float(model.count) == 0
    assert model.other is not theirs
