"""Tables that a model keeps, and makes with the dtype and device of an input: the form of it, and no value."""

from __future__ import annotations

import copy
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
    "to data": lambda length, x: ramp(length).to(x.data),
    "to the transposed": lambda length, x: ramp(length) + torch.zeros_like(x[0].T[:, 0]),
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


class Rotary(Growing):
    """Makes its table in the dtype of what a layer has computed."""

    def __init__(self, make: Make) -> None:
        super().__init__(make)
        self.first = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.first(x))


BY_DTYPE: dict[str, Make] = {
    "to a tensor": lambda length, x: ramp(length).cos().to(x),
    "type_as": lambda length, x: ramp(length).cos().type_as(x),
    "to a dtype": lambda length, x: ramp(length).cos().to(x.dtype),
    "new_tensor": lambda length, x: x.new_ones(length, 1) * 0.3,
}


@pytest.mark.slow
@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("name", BY_DTYPE)
def test_a_table_stays_in_the_dtype_of_the_first_call(name: str, adaptive: bool) -> None:
    torch.manual_seed(0)
    model = Rotary(BY_DTYPE[name]).eval()
    eager, x = copy.deepcopy(model), torch.randn(2, 5, 4)
    extractor = featx.create_feature_extractor(model, ["out"], example_inputs=x, adaptive=adaptive)
    with torch.no_grad():
        assert torch.equal(extractor(x)["out"], eager(x))
        with torch.autocast("cpu", torch.bfloat16):
            eager(x)
            with pytest.raises(
                featx.SpecializationError, match=r"keeps a table: torch.bfloat16|a table in torch.float32"
            ):
                extractor(x)
        assert torch.equal(extractor(x[:, :3])["out"], eager(x[:, :3]))
        model.bfloat16()
        with pytest.raises(featx.SpecializationError, match=r"keeps a table: torch.bfloat16|a table in torch.float32"):
            extractor(x.bfloat16())


class OfMaps(nn.Module):
    """Adds a table to the tokens of a map, which it makes anew for another number of these."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.out = nn.Conv2d(3, 4, 8, 8), nn.Linear(4, 4)
        self.table: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x)
        height, width = x.shape[-2:]
        x = x.flatten(2).transpose(1, 2)
        if self.table is None or self.table.shape[0] != height * width:
            down, across = torch.linspace(0, 1, height), torch.linspace(0, 1, width)
            places = torch.stack(torch.meshgrid(down, across, indexing="ij"), -1)
            self.table = places.flatten(0, 1).repeat(1, 2).to(x)
        return self.out(x + self.table)


def test_a_table_that_is_found_by_the_number_of_tokens_fixes_height_and_width() -> None:
    extractor = featx.create_feature_extractor(OfMaps().eval(), ["out"], example_inputs=torch.rand(2, 3, 32, 64))
    assert extractor(torch.rand(3, 3, 32, 64))["out"].shape == (3, 32, 4)
    with pytest.raises(featx.SpecializationError, match="would use it at another length"):
        extractor(torch.rand(2, 3, 64, 32))


def test_a_table_of_a_rounded_length_fixes_it() -> None:
    def make(length: int, x: torch.Tensor) -> torch.Tensor:
        return torch.linspace(0, 1, -(-length // 8) * 8)[:, None].to(x)

    class Rounded(Growing):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.table is None or self.table.shape[0] < x.shape[1]:
                self.table = self.make(x.shape[1], x)
            return self.out(x + self.table[: x.shape[1]])

    extractor = featx.create_feature_extractor(Rounded(make).eval(), ["out"], example_inputs=torch.rand(2, 6, 4))
    with pytest.raises(featx.SpecializationError, match="would use it at another length"):
        extractor(torch.rand(2, 12, 4))


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
