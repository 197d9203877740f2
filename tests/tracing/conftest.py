"""What the tests of the tracer share: graphs as comparable text, and models as comparable state."""

from __future__ import annotations

import operator
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from featx.tracing.environment.other_threads import AllThreads

# torch.fx records `x += y` as an addition, which leaves an alias of `x` unchanged; featx records the write.
_IN_PLACE = {getattr(operator, f"i{name}"): name for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")}


def _row(node: Any) -> str:
    target = node.target
    name = target if isinstance(target, str) else getattr(target, "__name__", repr(target))
    text = f"{node.op} {node.name} = {_IN_PLACE.get(target, name)} {node.args} {dict(node.kwargs)}"
    return re.sub(r"0x[0-9a-f]+", "0x", text)


@pytest.fixture
def rows() -> Callable[[Any], list[str]]:
    """A function that describes the nodes of a featx or torch.fx graph, one line each, in the same words."""
    return lambda graph: [_row(node) for node in graph.nodes]


@pytest.fixture
def undisturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no trace run again because a thread of the test runner has run meanwhile."""
    monkeypatch.setattr(AllThreads, "have_run", lambda self: False)


class Snapshot:
    """The state of a model and of the generators, to be compared later."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before = _describe(model)
        self._values = [tensor.clone() for tensor in (*model.parameters(), *model.buffers())]
        self._torch_state = torch.get_rng_state()
        self._python_state = random.getstate()

    def check(self) -> None:
        """Fail where anything differs from when this was made."""
        after = _describe(self._model)
        for key, value in self._before.items():
            assert after[key] == value, key
        assert after.keys() == self._before.keys()
        for one, other in zip(self._values, (*self._model.parameters(), *self._model.buffers()), strict=True):
            assert torch.equal(one, other)
        assert torch.equal(self._torch_state, torch.get_rng_state())
        assert self._python_state == random.getstate()


def _describe(model: nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        for name, value in module.__dict__.items():
            found[f"{path}.{name}"] = (id(value), type(value))
            if isinstance(value, dict):
                found[f"{path}.{name} items"] = [(key, id(item)) for key, item in value.items()]
        found[f"{path}.training"] = module.training
    return found


@pytest.fixture
def snapshot() -> type[Snapshot]:
    """The class of snapshots: `before = snapshot(model)`, and later `before.check()`."""
    return Snapshot
