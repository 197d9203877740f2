"""A module that is called again where Python decides so: its path means the last call, whichever that is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import featx
from featx.tracing.guards.guards import check_decision


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)) * 1.5


class Refines(nn.Module):
    """Calls a module until the values are large."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = Cell(), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(5):
            x = self.cell(x)
            if self.is_done(x):
                break
        return self.head(x)

    def is_done(self, x: torch.Tensor) -> bool:
        return x.mean().item() > 0.0


class RefinesByFunction(Refines):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, again = self.step(x), 3
        while again and is_small(x):
            x, again = self.step(x), again - 1
        return self.head(x)

    def step(self, x: torch.Tensor) -> torch.Tensor:
        return self.cell(x)


def is_small(x: torch.Tensor) -> bool:
    return float(x.mean()) < 0.0


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.cell(x)
        if float(y.sum()) > 3:
            y = self.cell(y * 0.5)
        return self.head(y)


class TwiceInOneLine(Twice):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.cell(x)
        return self.head(self.cell(y * 0.5) if float(y.sum()) > 3 else y)


class Stages(nn.Module):
    """A list of blocks, of which the last one that is called gives the value of the list."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.ModuleList([Cell() for _ in range(4)])
        self.head = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.cell:
            x = block(x)
            if x.mean().item() > 0.0:
                break
        return self.head(x)


class AsksTwice(Refines):
    """Asks in one method at two places, and after the first one calls the module for sure."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = 2.0 if self.is_done(x) else 1.0
        x = self.cell(x * scale)
        return self.head(x if self.is_done(x) else self.cell(x))


class AsksTwiceFirst(Refines):
    """Asks in one method at two places, and after the second one calls the module or not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.cell(x)
        if self.is_done(y):
            y = self.cell(y)
        if self.is_done(y):
            return self.head(y)
        return self.head(self.cell(y * 3))


MODELS: list[Callable[[], nn.Module]] = [
    Refines, RefinesByFunction, Twice, TwiceInOneLine, Stages, AsksTwice, AsksTwiceFirst,
]  # fmt: skip


def last_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return what the last call of the module `cell`, or of one in the list, has returned."""
    seen: list[torch.Tensor] = []
    cell = model.get_submodule("cell")
    hooked = list(cell) if isinstance(cell, nn.ModuleList) else [cell]
    handles = [each.register_forward_hook(lambda m, args, output: seen.append(output)) for each in hooked]
    model(x)
    for handle in handles:
        handle.remove()
    return seen[-1]


@pytest.mark.slow
@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("make", MODELS)
def test_the_last_call_is_that_of_the_input(make: Callable[[], nn.Module], adaptive: bool) -> None:
    torch.manual_seed(0)
    model = make().eval()
    eager = copy.deepcopy(model)
    inputs = [torch.randn(2, 8) * (4 if number % 2 else 0.2) for number in range(12)]
    refused = agreed = 0
    extractor = featx.create_feature_extractor(model, {"cell": "y"}, example_inputs=inputs[0], adaptive=adaptive)
    for x in inputs:
        try:
            found: Any = extractor(x)["y"]
        except featx.SpecializationError:
            refused += 1
            continue
        assert torch.equal(found, last_of(eager, x))
        agreed += 1
    assert agreed
    assert (refused > 0) is not adaptive


def test_a_block_of_a_list_needs_nothing_after_it() -> None:
    torch.manual_seed(0)
    model = Stages().eval()
    x = next(x for x in (torch.randn(2, 8) * 3 for _ in range(500)) if model.cell[0](x).mean() < 0)
    extractor = featx.create_feature_extractor(model, ["cell.0"], example_inputs=x, adaptive=False)
    called = {str(node.target) for node in extractor.graph.find_nodes(op="call_module")}
    assert called in ({"cell.0"}, {"cell.0.linear"})


class AsksAtTheEnd(Refines):
    """Asks in one method at two places, after the second of which the module is not called."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.cell(x * 2 if self.is_done(x) else x)
        return self.head(x if self.is_done(x) else -x)


def test_decisions_after_which_the_module_is_not_called_are_not_needed() -> None:
    model, x = AsksAtTheEnd().eval(), torch.randn(2, 8)
    extractor = featx.create_feature_extractor(model, ["cell"], example_inputs=x, adaptive=False)
    assert len(extractor.graph.find_nodes(op="call_function", target=check_decision)) == 1
