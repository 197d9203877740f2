"""FeatureTracer: torchvision's leaf policy, traced in the mode that was asked for."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import featx
from featx.features.building.feature_tracer import check_model
from featx.tracing.replica.replica import Replica

Unchanged = Callable[[nn.Module], Callable[[], None]]


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def test_listed_classes_and_their_subclasses_are_leaves() -> None:
    class Sub(Own):
        pass

    model = nn.Sequential(Own(), Sub())
    graph = featx.FeatureTracer(leaf_modules=[Own]).trace(model)
    assert [node.target for node in graph.nodes if node.op == "call_module"] == ["0", "1"]
    graph = featx.FeatureTracer(leaf_modules=(Sub,)).trace(model)
    assert [node.target for node in graph.nodes if node.op == "call_module"] == ["0.linear", "1"]


def test_tracer_takes_lists_where_torchvision_users_give_lists() -> None:
    tracer = featx.FeatureTracer(autowrap_modules=[sys], autowrap_functions=[len], leaf_modules=[Own])  # type: ignore[arg-type]
    assert tracer.trace(nn.Sequential(Own())).find_nodes(op="call_module", target="0")


def test_classes_of_torchvision_ops_are_leaves_where_torchvision_is_loaded() -> None:
    ops = pytest.importorskip("torchvision.ops")
    model = nn.Sequential(ops.Conv2dNormActivation(3, 3), ops.Permute([0, 1]))
    graph = featx.FeatureTracer().trace(model)
    assert [node.target for node in graph.nodes if node.op == "call_module"] == ["0", "1"]


def test_tracer_works_without_torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision.ops", None)
    assert len(featx.FeatureTracer().trace(Own()).nodes) == 3


def test_input_whose_default_is_none_is_traced_as_none() -> None:
    class Masked(nn.Module):
        def forward(self, x: torch.Tensor, mask: Any = None) -> torch.Tensor:
            return x if mask is None else x * mask

    graph = featx.FeatureTracer().trace(Masked())
    assert not [node for node in graph.nodes if node.name.startswith("mul")]


def mixed() -> nn.Module:
    model = nn.Sequential(Own(), nn.Dropout(), nn.BatchNorm1d(3))
    model.train()
    model[2].eval()
    return model


@pytest.mark.parametrize("training", [True, False])
def test_every_module_of_a_replica_is_in_the_mode_and_the_model_in_its_own(
    training: bool, unchanged: Unchanged
) -> None:
    model = mixed()
    check = unchanged(model)
    assert {module.training for module in Replica(model, training).root.modules()} == {training}
    check()


def test_generators_are_as_before_afterwards(unchanged: Unchanged) -> None:
    class Drawing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("probabilities", torch.full((3,), 0.5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.bernoulli(self.probabilities) + torch.rand(3)

    model = Drawing()
    check = unchanged(model)
    featx.get_graph_node_names(model)
    check()
    assert isinstance(random.random(), float)


def test_train_method_of_the_model_itself_is_used() -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def train(self, mode: bool = True) -> Frozen:
            super().train(mode)
            self.norm.eval()
            return self

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(x) if self.norm.training else self.norm(x) + 1

    train_names, eval_names = featx.get_graph_node_names(Frozen().train())
    assert train_names == eval_names == ["x", "norm", "add"]


def test_graph_is_traced_in_the_mode_that_was_asked_for() -> None:
    class Branching(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1 if self.training else x - 1

    model = Branching()
    names = []
    for training in (True, False):
        tracer = featx.FeatureTracer()
        tracer.training = training
        names.append([node.name for node in tracer.trace(model).nodes])
    assert names == [["x", "add", "output"], ["x", "sub", "output"]]


def test_module_is_returned_and_anything_else_refused() -> None:
    model = mixed()
    assert check_model(model) is model
    with pytest.raises(featx.ArgumentTypeError, match="instance"):
        check_model(nn.Linear)


class TakesNoneByDefault(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)

    def forward(self, ids: Any = None, mask: Any = None) -> Any:
        return self.embedding(ids) * ids.shape[1]


@pytest.mark.parametrize("tracer", ["auto", "symbolic"])
def test_inputs_that_default_to_none_and_no_example_raise_with_the_way_out(tracer: Any) -> None:
    with pytest.raises(featx.TraceError, match=r"ids, mask are None there.*example_inputs"):
        featx.get_graph_node_names(TakesNoneByDefault(), tracer=tracer)


class ChecksItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.vision = nn.Conv2d(3, 4, 3), nn.Linear(3, 4)

    def forward(self, pixels: Any = None, extra: Any = None) -> Any:
        if pixels is None:
            raise ValueError("You have to specify pixels")
        x = self.conv(pixels).mean((2, 3))
        return x if extra is None else x + self.vision(extra)


def test_an_error_of_the_model_without_its_inputs_says_to_give_an_example() -> None:
    with pytest.raises(featx.TraceError, match=r"You have to specify pixels.*pixels, extra are None there"):
        featx.create_feature_extractor(ChecksItsInput(), ["conv"], tracer="symbolic")


def test_a_module_that_does_not_run_on_the_example_is_told() -> None:
    with pytest.raises(featx.NodeNameError, match=r"the module of this name does not run on these inputs"):
        featx.create_feature_extractor(ChecksItsInput(), ["vision"], example_inputs=torch.rand(1, 3, 8, 8))
    with pytest.raises(featx.NodeNameError, match=r"Did you mean 'conv'"):
        featx.create_feature_extractor(ChecksItsInput(), ["convv"], example_inputs=torch.rand(1, 3, 8, 8))


class Runs(torch.autograd.Function):
    """Runs a module without a record of its gradient, as reversible layers do."""

    @staticmethod
    def forward(ctx: Any, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return module(x)


class Reversible(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.inside = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Runs.apply(self.inside, self.first(x))


def test_a_module_that_runs_inside_a_call_that_is_one_node_is_told() -> None:
    with pytest.raises(featx.TraceError, match=r"'inside' of .* runs inside a call that is one node"):
        featx.create_feature_extractor(Reversible().eval(), ["inside"], example_inputs=torch.rand(2, 3))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:.*torch.jit:FutureWarning")
def test_a_module_inside_a_compiled_one_is_told() -> None:
    model = nn.Sequential(nn.Linear(3, 3), torch.jit.trace(Own(), torch.rand(2, 3)))
    with pytest.raises(featx.NodeNameError, match=r"lies inside of '1', a module that torch.jit has compiled"):
        featx.create_feature_extractor(model.eval(), ["1.linear"], example_inputs=torch.rand(2, 3))


def test_placeholders_among_concrete_args_leave_the_example_as_it_is() -> None:
    example = {"ids": torch.tensor([[1, 2]]), "mask": torch.ones(1, 2)}
    extractor = featx.create_feature_extractor(
        TakesNoneByDefault(), ["embedding"], concrete_args={"mask": featx.PH}, example_inputs=example
    )
    assert extractor(**example)["embedding"].shape == (1, 2, 4)
