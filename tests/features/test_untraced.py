"""A model that can be traced in one mode only: names and features of that mode, and an error in the other."""

from __future__ import annotations

import copy
import pickle
import random

import pytest
import torch
from torch import nn

import featx


class DrawsInTraining(nn.Module):
    """Draws from Python's generator in the chosen modes, which no graph can hold."""

    def __init__(self, modes: tuple[bool, ...] = (True,)) -> None:
        super().__init__()
        self.modes = modes
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.training in self.modes:
            x = x * random.random()
        return self.last(x)


class NeedsTargets(nn.Module):
    """Raises in train mode, as detection models do without targets."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            raise ValueError("train mode needs targets")
        return self.first(x)


def extractor_of(model: nn.Module) -> featx.GraphModule:
    return featx.create_feature_extractor(model, ["last"], example_inputs=torch.rand(2, 3), tracer="example")


@pytest.mark.parametrize("training", [True, False])
def test_mode_that_can_be_traced_gives_what_the_model_gives_and_the_other_raises(training: bool) -> None:
    model = DrawsInTraining((not training,)).train(training)
    extractor = extractor_of(model)
    x = torch.rand(5, 3)
    assert torch.equal(extractor(x)["last"], model(x))
    mode = "eval" if training else "train"
    for copied in (extractor, copy.deepcopy(extractor), pickle.loads(pickle.dumps(extractor))):
        with pytest.raises(featx.TraceError, match=f"no graph for {mode} mode.*draws from a random generator"):
            copied.train(not training)(x)
        assert torch.equal(copied.train(training)(x)["last"], model(x))


def test_model_in_eval_mode_of_which_only_train_mode_can_be_traced_is_refused_at_once() -> None:
    model = DrawsInTraining((False,))
    with pytest.raises(featx.TraceError, match="draws from a random generator") as raised:
        extractor_of(model.eval())
    assert any("call model.train() first" in note for note in raised.value.__notes__)
    x = torch.rand(5, 3)
    assert torch.equal(extractor_of(model.train())(x)["last"], model(x))


def test_mode_in_which_the_model_itself_raises_on_the_example_is_left_out() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU()).eval()
    x = torch.rand(1, 3)
    extractor = featx.create_feature_extractor(model, ["1"], example_inputs=x, tracer="example")
    assert torch.equal(extractor(x)["1"], model[1](model[0](x)))
    with pytest.raises(featx.TraceError, match="more than 1 value per channel"):
        extractor.train()(x)


@pytest.mark.parametrize("training", [True, False])
def test_model_that_cannot_be_traced_in_either_mode_raises_why(training: bool) -> None:
    model = DrawsInTraining((True, False)).train(training)
    with pytest.raises(featx.TraceError, match="draws from a random generator"):
        extractor_of(model)
    with pytest.warns(UserWarning, match=r"cannot be followed to its end.*draws from a random generator"):
        names = featx.get_graph_node_names(model, example_inputs=torch.rand(2, 3), tracer="example")
    assert names == (["x", "first"], ["x", "first"])
    assert model.training is training


def test_request_for_each_mode_needs_both() -> None:
    with pytest.raises(featx.TraceError, match="draws from a random generator"):
        featx.create_feature_extractor(
            DrawsInTraining(),
            train_return_nodes=["last"],
            eval_return_nodes=["last"],
            example_inputs=torch.rand(2, 3),
            tracer="example",
        )


def test_unknown_name_is_an_error_even_where_the_other_mode_cannot_be_traced() -> None:
    with pytest.raises(featx.NodeNameError, match="lasst"):
        featx.create_feature_extractor(DrawsInTraining(), ["lasst"], example_inputs=torch.rand(2, 3), tracer="example")


def test_names_of_the_mode_that_can_be_traced_are_listed_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="cannot be traced in train mode.*needs targets"):
        train, evaluation = featx.get_graph_node_names(
            NeedsTargets(), example_inputs=torch.rand(2, 3), tracer="example"
        )
    assert (train, evaluation) == ([], ["x", "first"])
