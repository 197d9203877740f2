"""mode_reads: whether anything asks in which mode a module is. Where nothing does, one trace is enough for both."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import featx
from featx.tracing.replica.mode_reads import ModeReads, has_set_mode, record_mode_reads
from featx.tracing.replica.replica import Replica

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


def listened(model: nn.Module) -> tuple[nn.Module, ModeReads]:
    """Return a replica of `model`, and what hears of the reads of modes in it."""
    replica, reads = Replica(model), ModeReads()
    record_mode_reads(replica.paths, reads)
    return replica.root, reads


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
    replica, reads = listened(Net(ask))
    try:
        replica(X)
    except KeyError:
        return
    assert reads.any


class Inside:
    is_inside = True


def test_layers_of_torch_that_ask_for_their_own_mode_are_not_heard() -> None:
    replica, reads = listened(Net())
    inside = Inside()
    reads.observe_run(inside)
    replica(X)
    assert not reads.any


def test_layers_of_torch_that_are_looked_into_are_heard() -> None:
    replica, reads = listened(Net())
    replica(X)
    assert reads.any


def test_subclass_of_a_layer_of_torch_is_heard() -> None:
    class Norm(nn.BatchNorm1d):
        pass

    replica, reads = listened(Norm(4))
    replica(X)
    assert reads.any


def test_setting_a_mode_of_a_replica_is_seen() -> None:
    model = Net()
    replica, _ = listened(model)
    assert not any(map(has_set_mode, replica.modules()))
    replica.norm.eval()
    assert not replica.norm.training
    assert [module for module in replica.modules() if has_set_mode(module)] == [replica.norm]
    assert model.norm.training


@pytest.mark.usefixtures("undisturbed")
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
    _, reads = listened(nn.Sequential(torch.jit.script(nn.Linear(4, 4))))
    assert reads.any


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copy_that_is_made_meanwhile_knows_its_mode(duplicate: Callable[[nn.Module], nn.Module]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout()).eval()
    twin = duplicate(listened(model)[0])
    assert torch.equal(twin(X), model(X))
    twin.train()
    assert twin.training
    assert twin[1].training
