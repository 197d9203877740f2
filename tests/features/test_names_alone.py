"""A name asked for alone means what the list of names says, whatever modules are kept whole for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from agreement import same
from torch import nn

import featx
from featx.features.building.tracing import ModelTracing
from featx.features.building.tracing_options import TracingOptions

IMAGES = torch.rand(2, 6, 4, 4, generator=torch.Generator().manual_seed(0))
SEQUENCES = torch.rand(2, 5, 8, generator=torch.Generator().manual_seed(0))


class Plus(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x) + 1


class PassesAPartOn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Plus()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = torch.chunk(x, 3, 1)
        return torch.cat([self.inner(parts[0]), parts[1] + 1, parts[2] * 2], 1)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(6, 4, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.conv(x)
        return y, y * 2


class TakesApartWhatModulesReturn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Two()
        self.second = Two()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.first(x)
        c = self.second(x)
        return a + b + c[0] * c[1] + x[:, :4]


class LastStates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states = self.lstm(x)
        return states[0]


class AllStates(LastStates):
    def forward(self, x: torch.Tensor) -> Any:
        return self.lstm(x)


class ReturnsPartsOfALeaf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = LastStates()
        self.all = AllStates()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.one(x)
        z = self.all(y)
        hidden = z[1]
        return z[0][:, 0] + hidden[0][0] + hidden[1][0] + y[:, 1]


class Length(nn.Module):
    def forward(self, x: torch.Tensor) -> int:
        shape = x.shape
        return shape[2]


class PassesSizes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.height = Length()
        self.again = Length()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = x.shape
        return x.view(-1, self.height(x) * self.again(x)) * shape[1]


class Calls(nn.Module):
    def __init__(self, shared: Plus) -> None:
        super().__init__()
        self.__dict__["shared"] = shared  # at home in the model, called in here

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.shared(x) * 2


class SharesAModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared = Plus()
        self.other = Calls(self.shared)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x[:, :2]
        return self.shared(self.other(self.shared(x))) + x


MODELS: list[tuple[type[nn.Module], torch.Tensor]] = [
    (PassesAPartOn, IMAGES),
    (TakesApartWhatModulesReturn, IMAGES),
    (ReturnsPartsOfALeaf, SEQUENCES),
    (PassesSizes, IMAGES),
    (SharesAModule, IMAGES),
]


def values_of_the_list(model: nn.Module, x: torch.Tensor) -> dict[str, Any]:
    """Run the graph in which names are listed, and return what each named node gives."""
    tracing = ModelTracing(model, TracingOptions(example_inputs=x))
    tracing.training = False
    values: dict[str, Any] = {}

    class Recording(featx.Interpreter):
        def run_node(self, node: featx.Node) -> Any:
            result = super().run_node(node)
            if "qualified_name" in node.meta:
                values[node.meta["qualified_name"]] = result
            return result

    Recording(featx.GraphModule(model, tracing.graph())).run(x)
    return values


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "x"), MODELS, ids=[kind.__name__ for kind, _ in MODELS])
def test_each_name_alone_has_the_value_that_it_has_in_the_list(kind: type[nn.Module], x: torch.Tensor) -> None:
    torch.manual_seed(0)
    model = kind().eval()
    expected = values_of_the_list(model, x)
    names = featx.get_graph_node_names(model, example_inputs=x)[1]
    assert names == list(expected)
    for name in names:
        extractor = featx.create_feature_extractor(model, [name], example_inputs=x).eval()
        assert same(extractor(x)[name], expected[name]), name


def test_part_that_is_passed_on_is_named_by_the_module_that_takes_it() -> None:
    model = PassesAPartOn().eval()
    found = featx.create_feature_extractor(model, ["getitem", "getitem_1", "getitem_2"], example_inputs=IMAGES)(IMAGES)
    assert all(torch.equal(one, other) for one, other in zip(found.values(), IMAGES.chunk(3, 1), strict=True))


def test_path_of_a_module_means_its_last_call_also_where_another_module_makes_that() -> None:
    model = SharesAModule().eval()
    outputs: list[torch.Tensor] = []
    handle = model.shared.register_forward_hook(lambda module, args, output: outputs.append(output))
    model(IMAGES)
    handle.remove()
    found = featx.create_feature_extractor(model, ["shared"], example_inputs=IMAGES)(IMAGES)["shared"]
    assert torch.equal(found, outputs[-1])


class Fold(nn.Module):
    """Kept whole: it asks whether two values are one object."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.contiguous()
        return y.flatten(1) if y is x else x.flatten(1) * 1.0


class FoldsTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fold = Fold()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fold(x) + self.fold(x * 2)


def test_module_that_is_one_node_and_is_called_twice_has_two_values() -> None:
    model = FoldsTwice().eval()
    assert featx.get_graph_node_names(model, example_inputs=IMAGES)[1] == ["x", "fold", "mul", "fold_1", "add"]
    for request in (["fold", "fold_1"], ["fold_1"], ["fold"]):
        found = featx.create_feature_extractor(model, request, example_inputs=IMAGES).eval()(IMAGES)
        for name in request:
            assert torch.equal(found[name], IMAGES.flatten(1) * (2 if name == "fold_1" else 1))
