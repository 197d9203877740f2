"""Modules that run several times or are shared, and weights that forward uses directly or computes."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from agreement import agree, agree_with_gradients, gradients, image, same
from torch import nn
from torch.nn import functional

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


def test_each_call_of_a_shared_module_is_a_feature_of_its_own() -> None:
    model, seen = Shared(), list[torch.Tensor]()
    names = ["first", "first_1", "first_2"]
    extractor = featx.create_feature_extractor(model, names, example_inputs=image())
    hook = model.first.register_forward_hook(lambda module, args, output: seen.append(output.clone()))
    model(image(5))
    hook.remove()
    assert same(extractor(image(5)), dict(zip(names, seen, strict=True)))


class Tied(nn.Module):
    """Layers that share a weight, and one layer in several lists."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.layers = nn.ModuleList([self.first, self.second, self.first])
        self.named = nn.ModuleDict({"a": nn.Sequential(self.second, nn.Tanh()), "b": self.first})
        self.scales = nn.ParameterList([nn.Parameter(torch.arange(4.0)), self.first.bias])
        self.shifts = nn.ParameterDict({"k": nn.Parameter(torch.ones(4) / 3)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in [*self.layers, *self.named.values()]:
            x = layer(x)
        for scale in self.scales:
            x = x * scale
        return (x + self.shifts["k"]) @ self.second.weight.t() + self.get_parameter("first.bias")


def test_modules_and_weights_under_several_paths_are_those_of_the_model() -> None:
    model = Tied()
    traced = agree_with_gradients(model)
    assert {id(weight) for weight in traced.parameters()} == {id(weight) for weight in model.parameters()}
    with torch.no_grad():
        model.second.weight.mul_(2)
        model.scales[0].add_(1)
    assert same(traced(image()), model(image()))


def test_model_called_in_parts_and_in_unusual_ways_computes_the_same() -> None:
    class Unusual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.layers[1:](self.layers[:1](x))
            x = functools.partial(self.layers[0], input=x)()
            x = self.layers[2].forward(x) + nn.Linear.forward(self.layers[0], x)
            return getattr(self.layers, str(x.dim()))(x)

    agree_with_gradients(Unusual())


def test_change_of_a_weight_after_the_trace_is_seen() -> None:
    model = Shared()
    traced = featx.trace(model, image())
    with torch.no_grad():
        model.scale.fill_(3.0)
        model.first.weight.mul_(2)
        model.shift.add_(1)
    assert same(traced(image()), model(image()))


PARAMETRIZATIONS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "weight norm": nn.utils.parametrizations.weight_norm,
    "spectral norm": nn.utils.parametrizations.spectral_norm,
    "orthogonal": nn.utils.parametrizations.orthogonal,
}


class Parametrized(nn.Module):
    """Calls a layer that computes its weight, and reads the weight itself."""

    def __init__(self, parametrize: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.linear = parametrize(nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(functional.linear(self.linear(x), self.linear.weight)) * self.linear.weight.sum()


@pytest.mark.slow
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", PARAMETRIZATIONS)
def test_parametrized_weight_is_computed_in_each_call_and_has_gradients(name: str, training: bool) -> None:
    model = Parametrized(PARAMETRIZATIONS[name]).train(training)
    twin = copy.deepcopy(model)
    traced = featx.trace(model, image())
    for module in (model, twin):
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(1.5)
    for batch in (2, 7, 2):  # a spectral norm improves its estimate in each call
        assert same(traced(image(batch)), twin(image(batch)))
    assert same(gradients(traced, model, image()), gradients(twin, twin, image()))


def test_weight_norm_by_a_hook_is_computed_in_each_call() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the older way, which is still about
        model = nn.Sequential(nn.Linear(4, 4), nn.utils.weight_norm(nn.Linear(4, 3)))
    traced = agree(model, (image(),), (image(7),))
    with torch.no_grad():
        model[1].weight_g.mul_(1.5)
    assert same(traced(image()), model(image()))


def test_node_of_a_trace_says_where_it_is_from_and_what_it_gave() -> None:
    model = Shared()
    node = next(node for node in featx.trace(model, image(3)).graph.nodes if node.name == "relu")
    assert tuple(node.meta["shape"]) == (3, 4)
    assert node.meta["dtype"] is torch.float32
    assert node.meta["qualified_name"] == "relu"
    file, _, line = node.meta["source"].rpartition(":")
    assert "torch.relu(self.first" in Path(file).read_text().splitlines()[int(line) - 1]
