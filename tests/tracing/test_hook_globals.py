"""What hooks of a model keep in globals of their own file: a trace runs the hooks, and leaves nothing there."""

from __future__ import annotations

import functools
import gc
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import featx

X = torch.rand(2, 3)
features: dict[str, Any] = {}
log: list[str] = []
names: set[str] = set()
box = SimpleNamespace(last=None, deep={"calls": []})
calls = 0


def note(text: str) -> None:
    global calls
    calls += 1
    log.append(text)
    names.add(text)


def store(module: nn.Module, args: Any, output: torch.Tensor) -> None:
    features["last"] = box.last = output
    box.deep["calls"].append(output)
    note("stored")


class Store:
    def hook(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        store(module, args, output)


def keep(key: str, module: nn.Module, args: Any, output: torch.Tensor) -> None:
    features[key] = output


def store_under(key: str, module: nn.Module, args: Any, output: torch.Tensor) -> None:
    features[key] = output
    note(key)


HOOKS: dict[str, Callable[..., Any]] = {
    "function": store,
    "lambda": lambda module, args, output: store(module, args, output),
    "method": Store().hook,
    "partial": functools.partial(store_under, "key"),
}
CALLS: dict[str, Callable[[nn.Module], Any]] = {
    "names": lambda model: featx.get_graph_node_names(model, example_inputs=X),
    "extractor": lambda model: featx.create_feature_extractor(model, ["1.0"], example_inputs=X),
    "adaptive": lambda model: featx.create_feature_extractor(model, ["1.0"], example_inputs=X, adaptive=True),
    "trace": lambda model: featx.trace(model, X),
}


def held() -> tuple[Any, ...]:
    return dict(features), list(log), set(names), box.last, list(box.deep["calls"]), calls


@pytest.fixture(autouse=True)
def _emptied() -> None:
    for each in (features, log, names, box.deep["calls"]):
        each.clear()


def model_with(hook: Callable[..., Any]) -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.ReLU(), nn.Linear(3, 2)))
    model[1].register_forward_hook(hook)
    return model.eval()


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("hook", HOOKS)
def test_globals_that_hooks_write_stay_as_they_were(hook: str, call: str) -> None:
    model = model_with(HOOKS[hook])
    expected = model(X)
    before = held()
    assert before[1]
    CALLS[call](model)
    after = held()
    assert after[1:3] == before[1:3]
    assert [id(each) for each in after[0].values()] == [id(each) for each in before[0].values()]
    assert after[3] is before[3]
    assert list(map(id, after[4])) == list(map(id, before[4]))
    assert after[5] == before[5]
    assert torch.equal(model(X), expected)
    assert held()[5] == before[5] + 1


def test_tensors_that_a_hook_was_given_are_freed_with_the_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_with(store)
    # A walk over all objects of the process, which takes as long as several traces, looks for what keeps a tensor.
    monkeypatch.setattr(gc, "get_referrers", lambda *values: pytest.fail("a tensor of the trace lives on"))
    x = torch.rand(1013, 3)  # so many rows has no other tensor
    extractor = featx.create_feature_extractor(model, ["1.0"], example_inputs=x)
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of objects that warn where one asks for their class
        tensors = [each for each in gc.get_objects() if isinstance(each, torch.Tensor)]
    assert not [each for each in tensors if each.shape == (1013, 2)]  # as what the hook was given
    assert extractor(x)["1.0"].shape == (1013, 3)


def test_what_a_hook_stores_and_forward_reads_is_followed_in_one_file() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Sequential(nn.Linear(3, 3), nn.ReLU()), nn.Linear(3, 2)
            self.first.register_forward_hook(functools.partial(keep, "last"))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            return self.last(x + features["last"])

    model = Reads().eval()
    model(torch.rand(2, 3))
    extractor = featx.create_feature_extractor(model, ["first.0", "last"], example_inputs=X)
    for x in (X, torch.rand(5, 3)):
        assert torch.equal(extractor(x)["last"], model(x))
