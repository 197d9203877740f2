"""Buffers, parameters and modules that forward itself makes: computed as the model does, or refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from agreement import agree, image, same
from torch import nn

import featx

Snapshot = Callable[[nn.Module], Any]


class Making(nn.Module):
    def __init__(self, make: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(3))
        self.make = make

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.make(self, x)


def registered_once(model: Any, x: torch.Tensor) -> torch.Tensor:
    if not hasattr(model, "mask"):
        model.register_buffer("mask", torch.arange(x.shape[1]) + 1.0, persistent=False)
    return model.mask


def registered_always(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.register_buffer("mask", torch.arange(x.shape[1]) + 2.0)
    return model.mask


def assigned(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.table = torch.arange(x.shape[1]) + 3.0
    return model.table


def assigned_of_the_input(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.table = x.detach().mean(0)
    return model.table


def counted(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.table = model.table + 1
    return model.table.sum()


def parameter(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.weight = nn.Parameter(torch.ones(x.shape[1]) * 4)
    return model.weight


def layer(model: Any, x: torch.Tensor) -> torch.Tensor:
    return nn.init.ones_(nn.Linear(x.shape[1], x.shape[1], bias=False).weight).sum(0)


def grown(model: Any, x: torch.Tensor) -> torch.Tensor:
    if model.table.shape[0] < x.shape[1]:
        model.table = torch.arange(x.shape[1]) + 5.0
    return model.table[: x.shape[1]]


def plain_attribute(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.positions = torch.arange(x.shape[1]) + 6.0
    return model.positions


def layer_without_weights(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.activation = nn.Softplus()
    return model.activation(x)


REFUSED = [registered_always, assigned, assigned_of_the_input, counted, grown, parameter]


@pytest.mark.parametrize("make", REFUSED)
def test_model_that_makes_a_tensor_of_its_own_is_refused_and_as_before(
    make: Callable[[Any, torch.Tensor], torch.Tensor], snapshot: Snapshot
) -> None:
    model = Making(make)
    before = snapshot(model)
    with pytest.raises(featx.TraceError, match=r"assigns a new tensor|replaces 'weight'"):
        featx.trace(model, image())
    before.check()


def test_buffer_of_no_state_dict_that_the_first_call_registers_is_made_by_the_graph(snapshot: Snapshot) -> None:
    model = Making(registered_once)
    before = snapshot(model)
    traced = featx.trace(model, image())
    before.check()
    for batch in (2, 5, 2):
        assert same(traced(image(batch)), model(image(batch)))


def test_attribute_that_forward_makes_anew_is_made_by_the_graph_and_not_left_on_the_model(snapshot: Snapshot) -> None:
    model = Making(plain_attribute)
    before = snapshot(model)
    traced = featx.trace(model, image())
    before.check()
    for batch in (2, 5, 2):
        assert same(traced(image(batch)), Making(plain_attribute)(image(batch)))


@pytest.mark.parametrize("make", [*REFUSED, layer, plain_attribute, layer_without_weights])
def test_submodule_that_makes_a_tensor_does_so_in_each_call(
    make: Callable[[Any, torch.Tensor], torch.Tensor],
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Making(make), nn.Tanh())
    twin, third = copy.deepcopy(model), copy.deepcopy(model)
    traced = featx.trace(model, image())
    extractor = featx.create_feature_extractor(third, ["1", "2"], example_inputs=image())
    for batch in (2, 5, 2):
        hidden = twin[1](twin[0](image(batch)))
        assert same(traced(image(batch)), twin[2](hidden))
        assert same(extractor(image(batch)), {"1": hidden, "2": twin[2](hidden)})


def test_buffer_of_another_length_follows_where_it_has_been_made_by_a_run() -> None:
    model = Making(grown)
    model(image(2, 9))
    agree(model, (image(),), (image(5),))
