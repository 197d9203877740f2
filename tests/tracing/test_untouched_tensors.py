"""A trace leaves the model's tensors as they are, whichever way forward changes them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import featx

X = torch.rand(5, 4)
ROWS = nn.Embedding(6, 4, max_norm=0.1)
TABLE = torch.randn(6, 4)
OF_FILE = torch.ones(4)
BY_NAME = {"scale": torch.ones(4)}


class Changes(nn.Module):
    """Changes something of itself, after a decision on a buffer, for which a trace runs for real, or without one."""

    def __init__(self, change: Callable[[Changes, torch.Tensor], Any], *, decides: bool) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(4))
        self.listed = [torch.ones(4)]
        self.register_buffer("is_done", torch.tensor(0.0))
        self.change, self.decides = change, decides

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.decides or not self.is_done > 0:
            self.change(self, x)
        return self.layer(x) * self.scale + self.listed[0] + OF_FILE


def assign_data(module: Changes, x: torch.Tensor) -> None:
    module.scale.data = x.std(0)


def assign_data_of_all(module: Changes, x: torch.Tensor) -> None:
    for parameter in module.parameters():
        parameter.data = parameter.data * 2


def assign_data_of_file(module: Changes, x: torch.Tensor) -> None:
    OF_FILE.data = x.std(0)


def write_array(module: Changes, x: torch.Tensor) -> None:
    module.scale.detach().numpy()[:] = 3


def freeze(module: Changes, x: torch.Tensor) -> None:
    module.layer.requires_grad_(False)
    module.scale.requires_grad = False


def assign_gradient(module: Changes, x: torch.Tensor) -> None:
    module.scale.grad = torch.ones(4)


def register_hook(module: Changes, x: torch.Tensor) -> None:
    module.scale.register_hook(lambda gradient: gradient * 2)


def write_in_a_list(module: Changes, x: torch.Tensor) -> None:
    module.listed[0][:2].mul_(2)


def write_in_the_file(module: Changes, x: torch.Tensor) -> None:
    OF_FILE.mul_(2)


def replace_in_the_file(module: Changes, x: torch.Tensor) -> None:
    BY_NAME["scale"] = BY_NAME["scale"] + 1


def convert(module: Changes, x: torch.Tensor) -> None:
    module.layer.double()
    module.layer.float()


def swap(module: Changes, x: torch.Tensor) -> None:
    torch.utils.swap_tensors(module.scale, nn.Parameter(module.scale.detach() * 2))


WAYS = [
    assign_data, assign_data_of_all, assign_data_of_file, write_array, freeze, assign_gradient, register_hook,
    write_in_a_list, write_in_the_file, replace_in_the_file, convert, swap,
]  # fmt: skip


def state_of(module: Changes) -> list[Any]:
    tensors = [*module.parameters(), *module.buffers(), module.listed[0], OF_FILE, BY_NAME["scale"]]
    hooks = [len(getattr(each, "_backward_hooks", None) or ()) for each in tensors if each.requires_grad]
    forms = [(id(each), each.requires_grad, each.grad is None, each.tolist()) for each in tensors]
    return [forms, hooks, [each.data_ptr() for each in tensors]]


@pytest.mark.parametrize("names", [["0"], ["0.layer"], ["1"]])
@pytest.mark.parametrize("decides", [True, False])
@pytest.mark.parametrize("change", WAYS, ids=lambda change: change.__name__)
def test_a_trace_changes_no_tensor(
    change: Callable[[Changes, torch.Tensor], Any], decides: bool, names: list[str]
) -> None:
    changes = Changes(change, decides=decides)
    model = nn.Sequential(changes, nn.Linear(4, 2)).eval()
    before = state_of(changes)
    for make in (featx.get_graph_node_names, partial(featx.create_feature_extractor, return_nodes=names)):
        with suppress(featx.FeatxError):
            make(model, example_inputs=X)
        assert state_of(changes) == before


class Hides(nn.Module):
    """Runs a layer that is none of its submodules, as a student has its teacher."""

    def __init__(self, hidden: nn.Module) -> None:
        super().__init__()
        self.layer, self.hidden = nn.Linear(4, 4), [hidden]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.hidden[0](x)


class OfFile(nn.Module):
    def __init__(self, look_up: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.look_up = nn.Linear(4, 4), look_up

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.look_up(torch.arange(5))


def make_all(model: nn.Module, names: list[str]) -> None:
    for make in (featx.get_graph_node_names, partial(featx.create_feature_extractor, return_nodes=names), featx.trace):
        with suppress(featx.FeatxError):
            make(model, example_inputs=X)


@pytest.mark.parametrize("names", [["0", "1"], ["0.layer", "1"]])
@pytest.mark.parametrize("layer", [nn.BatchNorm1d(4), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))])
def test_a_trace_changes_no_statistics_of_a_layer_that_is_no_submodule(layer: nn.Module, names: list[str]) -> None:
    layer.train()
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    make_all(nn.Sequential(Hides(layer), nn.Linear(4, 2)).train(), names)
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())


@pytest.mark.parametrize("names", [["0", "1"], ["0.layer", "1"]])
@pytest.mark.parametrize(
    ("look_up", "table"),
    [
        (lambda ids: ROWS(ids), ROWS.weight),
        (lambda ids: nn.functional.embedding(ids, TABLE, max_norm=0.1), TABLE),
        (lambda ids: nn.functional.embedding(ids, TABLE, None, 0.1), TABLE),
        (lambda ids: nn.functional.embedding_bag(ids[:, None], TABLE, max_norm=0.1), TABLE),
    ],
    ids=["layer", "by name", "by position", "bag"],
)
def test_a_trace_renormalizes_no_table_of_a_file(
    look_up: Callable[[torch.Tensor], torch.Tensor], table: torch.Tensor, names: list[str]
) -> None:
    before = table.detach().clone()
    make_all(nn.Sequential(OfFile(look_up), nn.Linear(4, 2)).eval(), names)
    assert torch.equal(table, before)
    look_up(torch.arange(5))
    assert not torch.equal(table, before)
    with torch.no_grad():
        table.copy_(before)
