"""mode_reads: whether anything asks in which mode a module is. Where nothing does, one trace is enough for both."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import featx
from featx.tracing.mode_reads import mode_reads

X = torch.ones(2, 4)


class Net(nn.Module):
    """Calls `ask` with itself in each forward call."""

    def __init__(self, ask: Callable[[Net], Any] = lambda net: None) -> None:
        super().__init__()
        self.ask = ask
        self.calls = 0
        self.dropout = nn.Sequential(nn.Linear(4, 4), nn.Dropout())
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.dropout(x))
        CALLS.append(self)
        return x.relu() if self.ask(self) else x.sigmoid()


CALLS: list[Net] = []


def ask_all(net: Net) -> bool:
    modes = {module.training for module in net.modules()}
    return modes == {True}


QUESTIONS: list[Callable[[Net], Any]] = [
    lambda net: net.training,
    lambda net: getattr(net, "training", False),
    lambda net: net.norm.training,
    lambda net: net.dropout[1].training,
    lambda net: vars(net)["training"],
    lambda net: net.__dict__["training"],
    lambda net: {**vars(net.norm)}["training"],
    lambda net: copy.copy(net).training,
    ask_all,
]


@pytest.mark.parametrize("ask", QUESTIONS)
def test_model_that_asks_in_which_mode_it_is_has_names_for_each(ask: Callable[[Net], Any]) -> None:
    model = Net(ask)
    names = featx.get_graph_node_names(model, suppress_diff_warning=True, example_inputs=X)
    assert [found[-1] for found in names] == ["relu", "sigmoid"]


@pytest.mark.parametrize("ask", [*QUESTIONS, lambda net: copy.deepcopy(net.norm).training])
def test_every_question_is_heard_or_fails(ask: Callable[[Net], Any]) -> None:
    model = Net(ask)
    with mode_reads(model) as reads:
        try:
            model(X)
        except KeyError:
            return
    assert reads.any


def test_layers_of_torch_that_ask_for_their_own_mode_are_not_heard() -> None:
    model = Net()
    with mode_reads(model) as reads:
        model(X)
    assert not reads.any


def test_subclass_of_a_layer_of_torch_is_heard() -> None:
    class Norm(nn.BatchNorm1d):
        pass

    model = Norm(4)
    with mode_reads(model) as reads:
        model(X)
    assert reads.any


def test_setting_a_mode_is_heard_and_stays() -> None:
    model = Net()
    with mode_reads(model) as reads:
        model.norm.eval()
        assert not model.norm.training
    assert reads.any
    assert model.training
    assert not model.norm.training


def test_model_that_does_not_ask_runs_once() -> None:
    CALLS.clear()
    names = featx.get_graph_node_names(Net(), example_inputs=X)
    assert len(CALLS) == 1
    assert names == (["x", "dropout.0", "dropout.1", "norm", "sigmoid"],) * 2
    assert names[0] is not names[1]


@pytest.mark.parametrize("ask", [lambda net: None, lambda net: net.training])
def test_model_is_as_before(ask: Callable[[Net], Any]) -> None:
    model = Net(ask).eval()
    model.norm.train()
    before = [(list(vars(module).items()), list(module._modules.items())) for module in model.modules()]
    featx.get_graph_node_names(model, suppress_diff_warning=True, example_inputs=X)
    for module, (attributes, submodules) in zip(model.modules(), before, strict=True):
        assert [name for name, _ in attributes] == list(vars(module))
        assert all(vars(module)[name] is value for name, value in attributes)
        assert list(module._modules.items()) == submodules


def test_model_is_as_before_after_an_error() -> None:
    model = Net()
    before = list(vars(model.norm).items())
    with pytest.raises(ZeroDivisionError), mode_reads(model):
        raise ZeroDivisionError
    assert list(vars(model.norm).items()) == before


def test_model_whose_train_does_more_is_traced_in_both_modes() -> None:
    class Switching(nn.Module):
        is_fused = False

        def train(self, mode: bool = True) -> Switching:
            self.is_fused = not mode
            return super().train(mode)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sigmoid() if self.is_fused else x.relu()

    names = featx.get_graph_node_names(Switching().train(), suppress_diff_warning=True, example_inputs=X)
    assert names == (["x", "relu"], ["x", "sigmoid"])


def test_scripted_module_is_not_watched() -> None:
    with mode_reads(nn.Sequential(torch.jit.script(nn.Linear(4, 4)))) as reads:
        pass
    assert reads.any


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copy_that_is_made_meanwhile_knows_its_mode(duplicate: Callable[[nn.Module], nn.Module]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout()).eval()
    with mode_reads(model):
        twin = duplicate(model)
    assert torch.equal(twin(X), model(X))
    twin.train()
    assert twin.training
    assert twin[1].training


def test_another_thread_runs_the_model_meanwhile() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.BatchNorm1d(4)).eval()
    expected = model(X)
    is_over = threading.Event()
    found: list[bool] = []

    def run() -> None:
        while not is_over.is_set():
            found.append(torch.equal(model(X), expected))

    thread = threading.Thread(target=run)
    thread.start()
    for _ in range(200):
        with mode_reads(model):
            pass
    is_over.set()
    thread.join()
    assert found
    assert all(found)
