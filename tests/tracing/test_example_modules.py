"""Modules that run several times or are shared, and weights that forward uses directly or computes."""

from __future__ import annotations

from pathlib import Path

import torch
from agreement import agree, image, same
from torch import nn

import featx


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = self.first
        self.scale = nn.Parameter(torch.arange(4.0))
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(self.first(x)))) * self.scale + self.shift.sum()


def test_shared_module_called_several_times_and_direct_weights() -> None:
    model = Shared()
    agree(model, (image(),), (image(5),))
    names = featx.get_graph_node_names(model, example_inputs=image())[0]
    assert [name for name in names if name.startswith("first")] == ["first", "first_1", "first_2"]
    assert "second" not in names


def test_change_of_a_weight_after_the_trace_is_seen() -> None:
    model = Shared()
    traced = featx.trace(model, image())
    with torch.no_grad():
        model.scale.fill_(3.0)
        model.first.weight.mul_(2)
        model.shift.add_(1)
    assert same(traced(image()), model(image()))


class WithNormalizedWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def test_parametrized_weight_is_computed_in_each_call_and_has_gradients() -> None:
    model = WithNormalizedWeight()
    traced = agree(model, (image(),), (image(7),))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    assert same(traced(image()), model(image()))
    traced(image()).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_node_of_a_trace_says_where_it_is_from_and_what_it_gave() -> None:
    model = Shared()
    node = next(node for node in featx.trace(model, image(3)).graph.nodes if node.name == "relu")
    assert tuple(node.meta["shape"]) == (3, 4)
    assert node.meta["dtype"] is torch.float32
    assert node.meta["qualified_name"] == "relu"
    file, _, line = node.meta["source"].rpartition(":")
    assert "torch.relu(self.first" in Path(file).read_text().splitlines()[int(line) - 1]
