"""unfreeze undoes what freeze has done, and leaves alone what was frozen before."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import featx

X = torch.rand(2, 3, 32, 32)


class Stages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.BatchNorm2d(4))
        self.second = nn.Sequential(nn.Conv2d(4, 4, 3, 2, 1), nn.BatchNorm2d(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


@pytest.fixture
def model() -> nn.Module:
    return Stages().eval()


def trained(module: nn.Module) -> set[str]:
    return {name for name, parameter in module.named_parameters() if parameter.requires_grad}


def test_parameters_that_were_frozen_before_stay_so(model: nn.Module) -> None:
    model.get_submodule("first.0").requires_grad_(False)
    before = trained(model)
    assert {"first.0.weight", "first.0.bias"} == trained(Stages()) - before
    backbone = featx.create_backbone(model, strides=(2, 4), example_inputs=X).train()
    assert trained(backbone.freeze()) == set()
    assert trained(backbone.unfreeze()) == before
    assert trained(backbone.freeze(until=2).freeze_batch_norm().freeze()) == set()
    assert trained(backbone.unfreeze()) == before
    assert trained(backbone.unfreeze()) == before


def test_frozen_batch_norm_of_a_new_backbone_is_undone_alone(model: nn.Module) -> None:
    model.get_submodule("first").requires_grad_(False)
    before = trained(model)
    backbone = featx.create_backbone(model, strides=(2, 4), example_inputs=X, frozen_batch_norm=True).train()
    assert trained(backbone) == {"second.0.weight", "second.0.bias"}
    assert trained(backbone.unfreeze()) == before
    assert backbone.get_submodule("first.1").training


def test_batch_norms_in_eval_mode_before_stay_so(model: nn.Module) -> None:
    backbone = featx.create_backbone(model, strides=(2, 4), example_inputs=X).train()
    model.get_submodule("first.1").eval()
    backbone.freeze().unfreeze()
    assert [model.get_submodule(name).training for name in ("first.1", "second.1")] == [False, True]


def test_batch_norms_have_the_mode_of_the_last_switch_after_it(model: nn.Module) -> None:
    backbone = featx.create_backbone(model, strides=(2, 4), example_inputs=X).freeze()
    assert not any(backbone.train().get_submodule(name).training for name in ("first.1", "second.1"))
    backbone.unfreeze()
    assert all(backbone.get_submodule(name).training for name in ("first.1", "second.1"))
    backbone.freeze().eval().unfreeze()
    assert not any(backbone.get_submodule(name).training for name in ("first.1", "second.1"))


def test_weights_that_are_trained_in_spite_of_it_stay_so_in_another_mode(model: nn.Module) -> None:
    backbone = featx.create_backbone(model, strides=(2, 4), example_inputs=X).freeze()
    backbone.requires_grad_(True).train().eval()
    assert trained(backbone) == {name for name, _ in backbone.named_parameters()}


def test_a_copy_is_unfrozen_alone(model: nn.Module) -> None:
    model.get_submodule("first").requires_grad_(False)
    before = trained(model)
    backbone = featx.create_backbone(model, strides=(2, 4), example_inputs=X).freeze()
    assert trained(copy.deepcopy(backbone).unfreeze()) == before
    assert trained(backbone) == set()
