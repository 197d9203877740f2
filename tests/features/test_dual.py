"""DualGraphModule: train() and eval() choose the graph, before and after copies and pickles."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import featx
from featx.ir.equality import is_same_graph

torchvision = pytest.importorskip("torchvision")
from torchvision.models import feature_extraction as theirs  # noqa: E402 - after importorskip

X = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))


class Switching(nn.Module):
    """Gives another value in each mode, by code of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.main = nn.Linear(3, 3)
        self.auxiliary = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.main(x)
        return (y + self.auxiliary(x)).relu() if self.training else y.relu()


def saved(module: Any) -> Any:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


ROUND_TRIPS: dict[str, Callable[[Any], Any]] = {
    "none": lambda module: module,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "torch.save": saved,
    "twice": lambda module: copy.deepcopy(pickle.loads(pickle.dumps(module))),
}


def extractor_of(model: nn.Module) -> featx.DualGraphModule:
    return featx.create_feature_extractor(model, ["relu"], suppress_diff_warning=True)


@pytest.mark.parametrize("round_trip", ROUND_TRIPS)
@pytest.mark.parametrize("training", [True, False], ids=["from train", "from eval"])
def test_train_and_eval_switch_graphs(round_trip: str, training: bool) -> None:
    model = Switching().train(training)
    extractor = ROUND_TRIPS[round_trip](extractor_of(model))
    for mode in (training, not training, training, True, False, True):
        extractor.train(mode)
        assert extractor.training is mode
        assert torch.equal(extractor(X)["relu"], model.train(mode)(X))


def graph_of_input() -> featx.Graph:
    graph = featx.Graph()
    graph.output({"own": graph.placeholder("x")})
    return graph


@pytest.mark.parametrize("round_trip", ROUND_TRIPS)
@pytest.mark.parametrize("training", [True, False], ids=["in train", "in eval"])
def test_replaced_graph_is_that_of_its_mode(round_trip: str, training: bool) -> None:
    model = Switching()
    extractor = extractor_of(model).train(training)
    extractor.graph = graph_of_input()
    extractor = ROUND_TRIPS[round_trip](extractor)
    for mode in (training, not training, training, training):
        extractor.train(mode)
        expected = {"own": X} if mode is training else {"relu": model.train(mode)(X)}
        found = extractor(X)
        assert found.keys() == expected.keys()
        assert all(map(torch.equal, found.values(), expected.values()))


def test_replaced_graph_of_both_modes_is_that_of_both() -> None:
    extractor = featx.create_feature_extractor(nn.Sequential(nn.Linear(3, 3)), ["0"])
    extractor.graph = graph_of_input()
    assert [list(extractor.train(mode)(X)) for mode in (True, False, True)] == [["own"]] * 3


def test_refused_graph_changes_nothing() -> None:
    extractor, graph = extractor_of(Switching()).eval(), featx.Graph()
    graph.output(graph.call_module("nowhere", (graph.placeholder("x"),)))
    with pytest.raises(featx.TargetError, match="nowhere"):
        extractor.graph = graph
    assert [list(extractor.train(mode)(X)) for mode in (False, True, False)] == [["relu"]] * 3


@pytest.mark.parametrize("round_trip", ["pickle", "torch.save"])
def test_extractor_of_torchvision_does_not_switch_after_a_round_trip(round_trip: str) -> None:
    model = Switching().train()
    other = theirs.create_feature_extractor(model, ["relu"], suppress_diff_warning=True)
    try:
        loaded = ROUND_TRIPS[round_trip](other).eval()
    except AttributeError:  # older torch.fx cannot pickle a module whose annotations are text
        return
    assert not torch.equal(loaded(X)["relu"], model.eval()(X)), "if it does now, tell the documentation"


@pytest.mark.parametrize("round_trip", ["deepcopy", "pickle", "torch.save"])
def test_copy_keeps_mode_keys_and_values_and_shares_nothing(round_trip: str) -> None:
    extractor = extractor_of(Switching().eval())
    twin = ROUND_TRIPS[round_trip](extractor)
    assert twin.training is False
    assert list(twin.state_dict()) == list(extractor.state_dict())
    assert torch.equal(twin(X)["relu"], extractor(X)["relu"])
    with torch.no_grad():
        twin.main.weight.zero_()
    assert not torch.equal(twin(X)["relu"], extractor(X)["relu"])


def test_switch_after_a_switch_and_a_copy_still_has_both_graphs() -> None:
    model = Switching().train()
    extractor = extractor_of(model).eval().train()
    twin = copy.deepcopy(extractor).eval()
    assert torch.equal(twin(X)["relu"], model.eval()(X))
    assert torch.equal(extractor(X)["relu"], model.train()(X))


def test_extractor_starts_in_the_mode_of_the_model() -> None:
    assert extractor_of(Switching().train()).training
    assert not extractor_of(Switching().eval()).training


def test_building_touches_no_mode_of_a_submodule() -> None:
    model = Switching().train()
    model.auxiliary.eval()
    extractor_of(model)
    assert [module.training for module in model.modules()] == [True, True, False]


def test_submodules_of_the_extractor_follow_its_mode() -> None:
    extractor = extractor_of(Switching().train()).eval()
    assert not any(module.training for module in extractor.modules())


def test_where_both_graphs_are_the_same_there_is_one() -> None:
    extractor = featx.create_feature_extractor(nn.Sequential(nn.Linear(3, 3), nn.Dropout(), nn.ReLU()), ["2"])
    assert extractor.train_graph is extractor.eval_graph
    first = extractor.forward
    assert extractor.eval().forward.__func__ is first.__func__


def test_one_graph_stays_one_after_a_copy() -> None:
    twin = copy.deepcopy(featx.create_feature_extractor(nn.Sequential(nn.Linear(3, 3)), ["0"]))
    assert twin.train_graph is twin.eval_graph
    assert twin.graph is twin.train_graph


def test_where_the_graphs_differ_each_is_there() -> None:
    extractor = extractor_of(Switching())
    assert extractor.train_graph is not extractor.eval_graph
    assert extractor.graph is extractor.train_graph
    assert extractor.eval().graph is extractor.eval_graph
    assert not extractor.eval_graph.find_nodes(op="call_module", target="auxiliary")


@pytest.mark.parametrize("round_trip", ROUND_TRIPS)
def test_both_graphs_know_the_module_that_has_their_targets(round_trip: str) -> None:
    extractor = ROUND_TRIPS[round_trip](extractor_of(Switching()))
    for graph in (extractor.train_graph, extractor.eval_graph):
        assert graph.owning_module is extractor
        graph.call_module("missing")
        with pytest.raises(featx.TargetError, match="missing"):
            graph.lint()


def test_edit_of_the_resting_graph_runs_when_it_is_switched_to() -> None:
    extractor = extractor_of(Switching().train())
    extractor.eval()
    before = extractor(X)["relu"]
    extractor.train()
    relu = next(node for node in extractor.eval_graph.nodes if node.name == "relu")
    with extractor.eval_graph.inserting_after(relu):
        doubled = extractor.eval_graph.call_function(torch.mul, (relu, 2))
    relu.replace_all_uses_with(doubled, lambda user: user is not doubled)
    extractor.eval()
    assert torch.equal(extractor(X)["relu"], before * 2)


def test_edit_of_the_running_graph_survives_switching_back_and_forth() -> None:
    extractor = extractor_of(Switching().eval())
    relu = next(node for node in extractor.graph.nodes if node.name == "relu")
    relu.target = "neg"
    expected = -extractor.main(X)
    assert torch.equal(extractor(X)["relu"], expected)
    assert torch.equal(extractor.train().eval()(X)["relu"], expected)


def test_graph_that_names_a_target_the_model_lacks_is_refused() -> None:
    graph = featx.Tracer().trace(Switching())
    with pytest.raises(featx.TargetError, match="main") as caught:
        featx.DualGraphModule(nn.Module(), graph, graph)
    assert isinstance(caught.value, (AttributeError, RuntimeError))


def test_train_takes_the_mode_by_position_and_returns_the_module() -> None:
    extractor = extractor_of(Switching())
    assert extractor.train(False) is extractor
    assert extractor.eval() is extractor


# -- is_same_graph -----------------------------------------------------------------------------------------------------


def traced(function: Callable[[Any], Any]) -> featx.Graph:
    return featx.Tracer().trace(function)


def test_graphs_of_one_function_are_the_same() -> None:
    def function(x: Any) -> Any:
        return {"a": [x + 1, (x[:, 0], None)]}

    assert is_same_graph(traced(function), traced(function))


@pytest.mark.parametrize(
    "other",
    [
        lambda x: x + 2,
        lambda x: x - 1,
        lambda x: 1 + x,
        lambda x: x + 1.0,
        lambda x: (x + 1) + 1,
        lambda x: (x + 1, x)[1],
        lambda x: [x + 1],
        lambda y: y + 1,
        lambda x: x + True,
    ],
)
def test_graphs_that_differ_anywhere_are_not_the_same(other: Callable[[Any], Any]) -> None:
    assert not is_same_graph(traced(lambda x: x + 1), traced(other))


def test_zero_and_negative_zero_are_not_the_same() -> None:
    assert not is_same_graph(traced(lambda x: x * 0.0), traced(lambda x: x * -0.0))
