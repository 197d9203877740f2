"""What forward does after the place where a trace without values ends, in models whose next call depends on it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

import featx

X = torch.rand(6, 8, generator=torch.Generator().manual_seed(0))


def check(y: torch.Tensor) -> None:
    """Ask for values, as a trace without them cannot."""
    if torch.isnan(y).any():
        raise ValueError("diverged")


class Stores(nn.Module):
    """Keeps something that the next call reads, after it has asked for values."""

    def __init__(self, store: Callable[[Any], None]) -> None:
        super().__init__()
        self.first, self.last, self.other = nn.Linear(8, 8), nn.Linear(8, 2), nn.Linear(8, 8)
        self.memory: Any = None
        self.count, self.seen, self.kept = 0, list[int](), {"n": 0}
        self.store = store

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x) * (1 + self.count + len(self.seen) + self.kept["n"])
        if self.memory is not None:
            y = y + self.memory
        y = self.other(y)
        check(y)
        self.store(self)
        return self.last(y)


STORES: dict[str, Callable[[Any], None]] = {
    "attribute": lambda model: setattr(model, "memory", 1.0),
    "counter": lambda model: setattr(model, "count", model.count + 1),
    "list": lambda model: model.seen.append(1),
    "dict": lambda model: model.kept.update(n=model.kept["n"] + 1),
    "module": lambda model: setattr(model, "other", copy.deepcopy(model.first)),
}


@pytest.mark.parametrize("name", STORES)
def test_what_is_stored_there_and_read_in_the_next_call_is_noticed(name: str) -> None:
    torch.manual_seed(0)
    with pytest.raises(featx.TraceError):
        featx.create_feature_extractor(Stores(STORES[name]).eval(), ["other"], example_inputs=X)


def test_what_is_stored_and_never_read_does_not_matter() -> None:
    model = Stores(lambda model: setattr(model, "unread", 1)).eval()
    found = featx.create_feature_extractor(model, ["other"], example_inputs=X)(X)["other"]
    assert torch.equal(found, model.other(model.first(X)))


def scale_gradient(value: torch.Tensor, factor: float) -> torch.Tensor:
    value.register_hook(lambda gradient: gradient * factor)
    return value


class Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(scale_gradient(self.first(x), 0.1))


def test_hooks_for_gradients_that_a_function_sets_hold_for_a_requested_value() -> None:
    torch.manual_seed(0)
    model = Hooked()
    twin = copy.deepcopy(model)
    values: list[torch.Tensor] = []
    twin.first.register_forward_hook(lambda module, args, output: values.append(output))
    twin(X)
    values[0].sum().backward()
    featx.create_feature_extractor(model, ["first"], example_inputs=X)(X)["first"].sum().backward()
    assert model.first.weight.grad is not None
    assert twin.first.weight.grad is not None
    assert torch.equal(model.first.weight.grad, twin.first.weight.grad)


def adapt(x: torch.Tensor, model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    y = model(x)
    y.var().backward()
    optimizer.step()
    return y


class Adapts(nn.Module):
    """Trains itself in each call, by a function that is no method of it."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return adapt(x, self.model, self.optimizer)


class Averages(nn.Module):
    """Moves one layer towards another, by a function."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher, self.student = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.teacher(x) + self.student(x)
        check(y)
        average(self.teacher, self.student)
        return y


def average(teacher: nn.Module, student: nn.Module) -> None:
    with torch.no_grad():
        for one, other in zip(teacher.parameters(), student.parameters(), strict=True):
            one.lerp_(other, 0.5)


def test_a_model_that_trains_itself_is_refused() -> None:
    with pytest.raises(featx.TraceError, match="calls backward"):
        featx.create_feature_extractor(Adapts().eval(), ["model.0"], example_inputs=X)


def test_weights_that_a_function_writes_change_in_each_call() -> None:
    torch.manual_seed(0)
    model = Averages().eval()
    twin = copy.deepcopy(model)
    extractor = featx.create_feature_extractor(model, ["teacher"], example_inputs=X)
    for _ in range(3):
        expected = twin.teacher(X)
        twin(X)
        assert torch.allclose(extractor(X)["teacher"], expected, atol=1e-6)


class Twice(nn.Module):
    """Calls a layer that writes its own tensors before and after it asks for values."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.last = layer, nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layer = self.layer
        y = layer(x)
        check(y)
        return self.last(y) + self.last(layer(x * 2))


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.BatchNorm1d(8),
    "spectral norm": lambda: spectral_norm(nn.Linear(8, 8)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_state_of_a_layer_that_is_called_again_is_that_of_the_model(name: str) -> None:
    torch.manual_seed(0)
    model = Twice(LAYERS[name]()).train()
    twin = copy.deepcopy(model)
    options: dict[str, Any] = {"example_inputs": X, "suppress_diff_warning": True}
    extractor = featx.create_feature_extractor(model, ["layer"], **options)
    for _ in range(2):
        extractor(X)
        twin(X)
    assert all(torch.equal(value, twin.state_dict()[key]) for key, value in model.state_dict().items())


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.layer(x))


def test_a_module_that_is_called_again_by_another_name_gives_its_last_value() -> None:
    torch.manual_seed(0)
    model = Twice(Encoder()).eval()
    found = featx.create_feature_extractor(model, ["layer"], example_inputs=X)(X)["layer"]
    assert torch.equal(found, model.layer(X * 2))


class Decays(nn.Module):
    """Writes a buffer before it asks for values as a number of Python, which no trace follows, and maybe after that."""

    def __init__(self, after: Callable[[Any], object]) -> None:
        super().__init__()
        self.first, self.after = nn.Linear(8, 8), after
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scale.mul_(0.9)
        y = self.first(x) * self.scale
        total = y.detach().numpy().sum()
        self.after(self)
        return y + float(total)


AFTER: dict[str, Callable[[Any], object]] = {
    "in place": lambda model: model.scale.mul_(0.5),
    "behind the version counter": lambda model: model.scale.data.mul_(0.5),
    "several at once": lambda model: torch._foreach_mul_([model.scale], 0.5),
    "another tensor": lambda model: setattr(model, "scale", model.scale * 0.5),
}


@pytest.mark.parametrize("name", AFTER)
def test_a_buffer_that_is_written_before_and_after_that_place_is_noticed(name: str) -> None:
    with pytest.raises(featx.TraceError, match="writes 'scale'"):
        featx.create_feature_extractor(Decays(AFTER[name]).eval(), ["mul"], example_inputs=X)


def test_a_buffer_that_is_written_before_that_place_alone_is_that_of_the_model() -> None:
    torch.manual_seed(0)
    model = Decays(lambda model: None).eval()
    twin = copy.deepcopy(model)
    extractor = featx.create_feature_extractor(model, ["mul"], example_inputs=X)
    for _ in range(3):
        found = extractor(X)["mul"]
        twin(X)
        assert torch.equal(found, twin.first(X) * twin.scale)
