"""Modes of submodules that neither train() nor eval() of the whole gives them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import featx

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


class Frozen(nn.Module):
    """Keeps its batch norm in eval mode, as detection backbones do."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x) + 1


class Scale(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 100 if self.training else x


@pytest.mark.parametrize("copied", [lambda e: e, copy.deepcopy, lambda e: pickle.loads(pickle.dumps(e))])
@pytest.mark.parametrize("kind", [Frozen, lambda: nn.Sequential(nn.Linear(4, 4), Frozen())])
def test_batch_norm_that_train_keeps_frozen_stays_frozen(
    kind: Callable[[], nn.Module], copied: Callable[[Any], Any]
) -> None:
    model = kind()
    name = featx.get_graph_node_names(model)[1][-1]
    extractor = copied(featx.create_feature_extractor(model, [name]))
    twin = copy.deepcopy(model)
    for mode in (True, False, True):
        expected = twin.train(mode)(X)
        assert torch.equal(extractor.train(mode)(X)[name], expected)
    assert [module.training for module in extractor.modules() if isinstance(module, nn.BatchNorm1d)] == [False]


@pytest.mark.parametrize("training", [True, False])
def test_part_in_another_mode_than_the_whole_computes_as_the_model_until_the_mode_is_set(training: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Scale(), nn.BatchNorm1d(4), nn.Sigmoid()).train(training)
    model[1].train(not training)
    model[2].train(not training)
    twin = copy.deepcopy(model)
    extractor = featx.create_feature_extractor(model, ["3"], suppress_diff_warning=True)
    for copied in (copy.deepcopy(extractor), pickle.loads(pickle.dumps(extractor))):
        assert torch.equal(copied(X)["3"], copy.deepcopy(twin)(X))
    for mode in (training, not training, training):
        assert torch.equal(extractor.train(mode)(X)["3"], twin.train(mode)(X))


def test_name_that_the_present_modes_lack_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Scale()).train()
    model[1].eval()
    with pytest.raises(featx.NodeNameError, match="as it is now"):
        featx.create_feature_extractor(model, train_return_nodes=["1.mul"], eval_return_nodes=["0"])


def test_model_without_values_that_overrides_train_lists_its_names() -> None:
    with torch.device("meta"):
        model = Frozen().train()
    train, eval_ = featx.get_graph_node_names(model, example_inputs=torch.empty(3, 4, device="meta"))
    assert train == eval_ == ["x", "norm", "add"]
    assert model.training
    assert not model.norm.training


# -- sizes in both modes -----------------------------------------------------------------------------------------------


class ReadsSizes(nn.Module):
    """Repeats its input as often as `times` says for itself and the length."""

    def __init__(self, times: Callable[[ReadsSizes, int], int]) -> None:
        super().__init__()
        self.times = times
        self.linear = nn.Linear(4, 4)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        RUNS.append(self)
        x = self.dropout(self.linear(x))
        return torch.cat([x + x.shape[0]] * self.times(self, x.shape[0])).relu()


RUNS: list[nn.Module] = []


@pytest.mark.slow
def test_what_is_free_in_one_mode_may_be_fixed_in_the_other() -> None:
    model = ReadsSizes(lambda module, n: len([0] * n) if module.training else 2)
    extractor = featx.create_feature_extractor(model, ["relu"], example_inputs=torch.rand(3, 4))
    x = torch.rand(5, 4)
    assert torch.equal(extractor.eval()(x)["relu"], model.eval()(x))
    with pytest.raises(featx.SpecializationError):
        extractor.train()(x)


def test_sizes_are_tried_in_one_mode_where_nothing_asks_for_it() -> None:
    runs: list[int] = []
    for times in (lambda module, n: 2, lambda module, n: 2 + 0 * module.training):
        RUNS.clear()
        extractor = featx.create_feature_extractor(ReadsSizes(times), ["relu"], example_inputs=torch.rand(3, 4))
        runs.append(len(RUNS))
        for mode in (True, False):
            assert extractor.train(mode)(torch.rand(7, 4))["relu"].shape == (14, 4)
            assert extractor.free_dims.of["x"][0] == "free"
    assert runs[0] < runs[1]


class Merging(nn.Module):
    """Adds an update to its weight for eval mode and takes it away for training, as layers of loralib do."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.is_merged = nn.Linear(4, 4), False
        self.down, self.up = nn.Parameter(torch.rand(2, 4)), nn.Parameter(torch.rand(4, 2))

    def train(self, mode: bool = True) -> Merging:
        super().train(mode)
        if mode is self.is_merged:
            self.base.weight.data += (-1 if mode else 1) * (self.up @ self.down)
            self.is_merged = not mode
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) if self.is_merged else self.base(x) + x @ self.down.T @ self.up.T


@pytest.mark.parametrize("adaptive", [None, True])
@pytest.mark.parametrize("name", ["0", "0.base"])
def test_weights_that_train_changes_are_those_of_the_mode(name: str, adaptive: bool | None) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Merging(), nn.Linear(4, 2)).eval(), torch.rand(3, 4)
    reference = copy.deepcopy(model)
    extractor = featx.create_feature_extractor(
        model, [name, "output"], example_inputs=x, adaptive=adaptive, suppress_diff_warning=True
    )
    assert torch.equal(extractor(x)["output"], reference(x))
    extractor.train(), reference.train()
    if name == "0.base" and adaptive is None:  # nobody calls train of the module around it
        with pytest.raises(featx.TraceError, match=r"train\(\) of '0' writes tensors"):
            extractor(x)
        return
    for training in (True, False, True):
        extractor.train(training), reference.train(training)
        assert torch.equal(extractor(x)["output"], reference(x))
