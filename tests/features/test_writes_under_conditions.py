"""Writes under conditions: that a line ran once says nothing of its next turn, of another call or another module."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import featx

ONES = torch.ones(2, 4)


def raise_if_positive(total: torch.Tensor, y: torch.Tensor) -> None:
    if y.mean() > 0:
        total.add_(1.0)


class Counts(nn.Module):
    """Adds to its buffer for some inputs, after the value that is requested. Each class does it in its own way."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + self.total
        if y.mean() > 0:
            self.total.add_(1.0)
        return y


class ByMethod(Counts):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + self.total
        if y.mean() > 0:
            self.count()
        return y

    def count(self) -> None:
        self.total.add_(1.0)


class InMethod(Counts):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + self.total
        self.count_if_positive(y)
        return y

    def count_if_positive(self, y: torch.Tensor) -> None:
        if y.mean() > 0:
            self.total.add_(1.0)


class ByFunction(Counts):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + self.total
        raise_if_positive(self.total, y)
        return y


class AfterReturn(Counts):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + self.total
        if y.mean() <= 0:
            return y
        self.total.add_(1.0)
        return y


class InExpression(Counts):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + self.total
        _ = y.mean() > 0 and self.total.add_(1.0)
        return y


class Twins(nn.Module):
    """Two modules of one class: on the example, only the first one writes."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.first, self.second = kind(), kind()

    def forward(self, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        first = self.first(x)
        return self.second(z) + first


class InTurns(nn.Module):
    """Writes in one turn of a loop on the example, and in others for other inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(2, 4))

    def forward(self, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        y = torch.stack([x, z]) + self.total.unsqueeze(1)
        for place in range(2):
            if y[place].mean() > 0:
                self.total[place].add_(1.0)
        return y


KINDS = [Counts, ByMethod, InMethod, ByFunction, AfterReturn, InExpression]
CALLS = [(ONES, -ONES), (ONES, ONES), (ONES, ONES), (ONES, -ONES)]


def check_calls(extractor: Any, model: nn.Module, path: str, key: str) -> None:
    """Compare calls with what a hook sees on a copy of the model, up to the first one that the extractor refuses."""
    seen: list[torch.Tensor] = []
    model.get_submodule(path).register_forward_hook(lambda module, args, output: seen.append(output.clone()))
    for inputs in CALLS:
        model(*inputs)
        try:
            found = extractor(*inputs)[key]
        except featx.SpecializationError:
            return
        assert torch.equal(found, seen[-1])


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_write_of_one_module_is_not_one_of_another_of_its_class(kind: type[nn.Module], training: bool) -> None:
    model = Twins(kind).train(training)
    request = {"first.add": "first", "second.add": "second"}
    extractor = featx.create_feature_extractor(
        model, train_return_nodes=request, eval_return_nodes=request, example_inputs=CALLS[0]
    )
    check_calls(extractor.train(training), copy.deepcopy(model), "second", "second")


def test_a_write_in_one_turn_of_a_loop_is_not_one_in_another() -> None:
    model = InTurns().eval()
    extractor = featx.create_feature_extractor(model, {"add": "y"}, example_inputs=CALLS[0])
    check_calls(extractor, copy.deepcopy(model), "", "y")


class Options:
    """What a module may keep its settings in."""

    training = True


class OptionCalledTraining(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(4))
        self.options = Options()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + self.total
        if self.options.training and y.mean() > 0:
            self.total.add_(1.0)
        return y


def test_an_option_called_training_is_not_the_mode_of_the_module() -> None:
    model = nn.Sequential(OptionCalledTraining()).eval()
    expected = copy.deepcopy(model)
    extractor = featx.create_feature_extractor(model, {"0.add": "y"}, example_inputs=-ONES)
    for x in (-ONES, ONES, ONES, -ONES):
        y = expected(x)
        try:
            found = extractor(x)["y"]
        except featx.SpecializationError:
            return
        assert torch.equal(found, y)


class Clamps(nn.Module):
    """Writes what it is given, for some inputs."""

    def __init__(self, *, inplace: bool) -> None:
        super().__init__()
        self.inplace = inplace

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.inplace and bool((x > 3).any()):
            x.clamp_(max=3.0)
        return x * 2


class ClampsBoth(nn.Module):
    """Clamps its second argument on other inputs than the example alone."""

    def __init__(self, *, by_twins: bool) -> None:
        super().__init__()
        self.first = Clamps(inplace=True)
        self.second = Clamps(inplace=True) if by_twins else self.first

    def forward(self, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        return self.first(x) + self.second(z)


class InLoop(nn.Module):
    def forward(self, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        for each in (x, z):
            if (each > 3).any():
                each.clamp_(max=3.0)
        return x + z


class Around(nn.Module):
    def __init__(self, clamps: nn.Module) -> None:
        super().__init__()
        self.x, self.z, self.clamps = nn.Identity(), nn.Linear(4, 4, bias=False), clamps
        nn.init.eye_(self.z.weight)

    def forward(self, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        return self.clamps(self.x(x) * 1, self.z(z))


@pytest.mark.parametrize("clamps", [ClampsBoth(by_twins=True), ClampsBoth(by_twins=False), InLoop()])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_what_a_whole_module_may_write_for_other_inputs_is_returned_as_it_was(clamps: nn.Module, mode: Any) -> None:
    model = Around(clamps).eval()
    request = {"z": "z", "clamps": "out"}
    extractor = featx.create_feature_extractor(model, request, example_inputs=(5 * ONES, ONES))
    for inputs in ((5 * ONES, ONES), (5 * ONES, 5 * ONES), (ONES, 5 * ONES)):
        with mode():
            found = extractor(*(each.clone() for each in inputs))
        assert torch.equal(found["z"], inputs[1])
        assert torch.equal(found["out"], model(*(each.clone() for each in inputs)))


def test_a_condition_beside_the_option_inplace_is_a_condition() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), Clamps(inplace=True)).eval()
    nn.init.eye_(model[0].weight)
    extractor = featx.create_feature_extractor(model, ["0", "1"], example_inputs=ONES)
    for x in (ONES, 5 * ONES):
        for mode in (torch.enable_grad, torch.inference_mode):
            with mode():
                assert torch.equal(extractor(x)["0"], x)
