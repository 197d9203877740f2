"""Tables that a model keeps, and makes with the dtype and device of an input: the form of it, and no value."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import featx
from featx.ir.form import sources_of_values

Make = Callable[[int, torch.Tensor], torch.Tensor]


class Growing(nn.Module):
    """Adds a table of positions, which it makes anew where it is too short."""

    def __init__(self, make: Make) -> None:
        super().__init__()
        self.make, self.length = make, 0
        self.table: torch.Tensor | None = None
        self.out = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] > self.length or self.table is None:
            self.length = x.shape[1]
            self.table = self.make(self.length, x)
        return self.out(x + self.table[: x.shape[1]])


def ramp(length: int) -> torch.Tensor:
    return torch.arange(length).float()[:, None]


BY_FORM: dict[str, Make] = {
    "to a tensor": lambda length, x: ramp(length).to(x),
    "to a part of one": lambda length, x: ramp(length).to(x[0, 0]),
    "type_as": lambda length, x: ramp(length).type_as(x),
    "zeros_like": lambda length, x: ramp(length) + torch.zeros_like(x[0, 0]),
    "zeros_like by name": lambda length, x: ramp(length) + torch.zeros_like(input=x[0, :1]),
    "new_ones": lambda length, x: ramp(length) * x.new_ones(4),
}


@pytest.mark.parametrize("name", BY_FORM)
def test_a_growing_table_fixes_no_length(name: str) -> None:
    model = Growing(BY_FORM[name]).eval()
    extractor = featx.create_feature_extractor(model, ["out"], example_inputs=torch.randn(2, 5, 4))
    for length in (3, 5, 9):
        x = torch.randn(3, length, 4)
        assert torch.equal(extractor(x)["out"], Growing.forward(model, x))


@pytest.mark.parametrize(
    "make",
    [
        lambda length, x: torch.linspace(0, 1, length)[:, None].to(x),
        lambda length, x: torch.full_like(x[0, :, :1], length),
    ],
)
def test_a_table_that_depends_on_its_length_fixes_it(make: Make) -> None:
    extractor = featx.create_feature_extractor(Growing(make).eval(), ["out"], example_inputs=torch.randn(2, 5, 4))
    with pytest.raises(featx.SpecializationError, match="would use it at another length"):
        extractor(torch.randn(2, 3, 4))


@pytest.mark.parametrize(
    "make",
    [lambda length, x: x[0, :, :1] * 2, lambda length, x: x.new_tensor(x[0, :, :1].tolist())],
)
def test_a_table_of_values_is_refused(make: Make) -> None:
    with pytest.raises(featx.TraceError):
        featx.create_feature_extractor(Growing(make).eval(), ["out"], example_inputs=torch.randn(2, 5, 4))


def test_of_what_the_values_are_used() -> None:
    graph = featx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    by_name = graph.call_function(torch.zeros_like, (), {"input": x})
    assert sources_of_values(by_name) == []
    assert sources_of_values(graph.call_function(torch.full_like, (), {"input": x, "fill_value": y})) == [y]
    assert sources_of_values(graph.call_method("new_tensor", (x, x))) == [x]
    assert sources_of_values(graph.call_method("to", (x, y))) == [x]
    assert sources_of_values(graph.call_method("to", (by_name,), {"other": y})) == [by_name]


def zeros_like(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_a_function_with_the_name_of_one_of_torch() -> None:
    graph = featx.Graph()
    x = graph.placeholder("x")
    assert sources_of_values(graph.call_function(zeros_like, (x,))) == [x]
