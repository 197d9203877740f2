"""Loops over `items[:n]`, where C code reads the number: it stands in no node, and every such graph is checked."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import nn

import featx


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 2)
        self.register_buffer("depth", torch.tensor(2))


class ByInput(Layers):
    def forward(self, x: torch.Tensor, depth: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[: int(depth)]:
            x = layer(x)
        return x


class ByItem(Layers):
    def forward(self, x: torch.Tensor, depth: torch.Tensor) -> torch.Tensor:
        for layer in [*self.layers][-depth.item() :]:
            x = layer(x)
        return self.head(x)


class BySize(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[: x.shape[0]]:
            x = layer(x)
        return x


class ByLastOnes(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[-x.shape[0] :]:
            x = layer(x)
        return x


class ByRepeating(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in [self.head.weight] * x.shape[0]:
            x = (x @ layer.t() @ layer).relu()
        return x


class OfList(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = [x]
        for layer in self.layers:
            values.append(layer(values[-1]))
        return values[: x.shape[0]][-1]


class ByRatio(Layers):
    def forward(self, x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        count = int(math.log2(like.shape[0] // x.shape[0]))
        for layer in self.layers[:count]:
            x = layer(x)
        return x


class BetweenItems(Layers):
    def forward(self, x: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
        first, last = bounds.tolist()
        for layer in self.layers[first:last]:
            x = layer(x)
        return self.head(x)


class BetweenItemsInReverse(Layers):
    def forward(self, x: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
        last, first = bounds.tolist()
        for layer in itertools.islice(self.layers, first, max(last, first)):
            x = layer(x)
        return self.head(x)


class BetweenSizes(Layers):
    def forward(self, x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[x.shape[0] : like.shape[0]]:
            x = layer(x)
        return self.head(x)


class BetweenItemsOfMore(Layers):
    """Reads other numbers too, larger and smaller ones."""

    def forward(self, x: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
        rows, columns = x.shape
        x = x.reshape(columns, rows).reshape(rows, columns)
        first, last = bounds.tolist()
        for layer in self.layers[first:last]:
            x = layer(x)
        return self.head(x)


class BetweenSizesOfMore(Layers):
    def between(self, first: int, last: int) -> Any:
        return self.layers[first:last]

    def forward(self, x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        rows, columns = x.shape
        y = x.reshape(columns, rows).reshape(rows, columns)
        for layer in self.between(rows, like.shape[0]):
            y = layer(y)
        return self.head(y)


def rows(count: int) -> torch.Tensor:
    return torch.rand(count, 4, generator=torch.Generator().manual_seed(count))


BY_DEPTH = [(rows(2), torch.tensor(depth)) for depth in (1, 2, 3, 5)]
BY_ROWS = [(rows(count),) for count in (1, 2, 3, 5)]
BY_RATIO = [(rows(2), rows(count)) for count in (2, 4, 8)]
BY_BOUNDS = [(rows(2), torch.tensor(bounds)) for bounds in ([2, 1], [1, 1], [1, 2], [0, 2])]
BY_SIZES = [(rows(first), rows(last)) for first, last in ((2, 1), (1, 1), (1, 2), (1, 3))]
CASES = {
    "an input": (ByInput, BY_DEPTH), "the last ones": (ByItem, BY_DEPTH), "a size": (BySize, BY_ROWS),
    "the last ones of a size": (ByLastOnes, BY_ROWS), "a list repeated": (ByRepeating, BY_ROWS),
    "values in a list": (OfList, BY_ROWS), "a ratio": (ByRatio, BY_RATIO),
    "between items": (BetweenItems, BY_BOUNDS), "between items, last first": (BetweenItemsInReverse, BY_BOUNDS),
    "between sizes": (BetweenSizes, BY_SIZES), "between sizes in a method": (BetweenSizesOfMore, BY_SIZES),
    "between items, and more": (BetweenItemsOfMore, BY_BOUNDS),
}  # fmt: skip


def run(model: Layers, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """What the model returns, and what those of its layers that ran do."""
    seen: list[torch.Tensor] = []
    handles = [layer.register_forward_hook(lambda m, args, output: seen.append(output)) for layer in model.layers]
    expected = model(*inputs)
    for handle in handles:
        handle.remove()
    return expected, seen


@pytest.mark.parametrize("example", range(4))
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("how", ["trace", "output", "the list", "adaptive"])
def test_another_number_is_right_or_refused(name: str, example: int, how: str) -> None:
    kind, inputs = CASES[name]
    given = inputs[min(example, len(inputs) - 1)]
    model = kind().eval()
    names = ["output"]
    if how == "trace":
        module: Any = featx.trace(model, *given)
    else:
        if how == "the list" and "list" not in name and run(model, given)[1]:
            names = ["layers"]
        adaptive = True if how == "adaptive" else None
        module = featx.create_feature_extractor(model, names, example_inputs=given, adaptive=adaptive)
    answered = 0
    for each in inputs:
        expected, seen = run(model, each)
        try:
            result = module(*each)
        except featx.SpecializationError:
            assert each is not given
            continue
        answered += 1
        if how == "trace":
            torch.testing.assert_close(result, expected, rtol=0, atol=0)
        else:
            (value,) = result.values()
            torch.testing.assert_close(value, expected if names == ["output"] else seen[-1], rtol=0, atol=0)
    assert answered >= 1
    if how == "adaptive":
        assert answered == len(inputs)


class Trunk(nn.Module):
    """Its layers are followed by others, which a request of the trunk does not need."""

    def __init__(self) -> None:
        super().__init__()
        self.body = BySize()
        self.after = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x)
        for layer in self.after:
            x = layer(x)
        return x


@pytest.mark.parametrize("names", [["body"], ["body.layers"], ["body.layers.0", "body"]])
def test_inside_of_a_module(names: list[str]) -> None:
    model = Trunk().eval()
    extractor = featx.create_feature_extractor(model, names, example_inputs=rows(1))
    for count in (1, 2, 3):
        seen: list[torch.Tensor] = []
        handle = model.body.register_forward_hook(lambda m, args, output, seen=seen: seen.append(output))
        model(rows(count))
        handle.remove()
        try:
            found = extractor(rows(count))
        except featx.SpecializationError:
            assert count > 1
            continue
        assert torch.equal(found[names[-1]], seen[0])


def test_what_follows_a_requested_module_may_depend_on_sizes() -> None:
    """The layers after the request differ with the size, and leave it free."""

    class Model(Layers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.head(x)
            return sum([x * 2] * x.shape[0])  # type: ignore[return-value]

    model = Model().eval()
    extractor = featx.create_feature_extractor(model, ["head"], example_inputs=rows(2))
    assert torch.equal(extractor(rows(5))["head"], model.head(rows(5)))


@pytest.mark.parametrize("node", ["layers.0", "layers.1", "layers.2"])
def test_a_layer_that_does_not_run_has_no_value(node: str) -> None:
    model = BySize().eval()
    extractor = featx.create_feature_extractor(model, [node], example_inputs=rows(3))
    for count in (0, 1, 2, 3):
        x = torch.rand(count, 4)
        _, seen = run(model, (x,))
        try:
            found = extractor(x)[node]
        except featx.SpecializationError:
            assert count < 3
            continue
        assert torch.equal(found, seen[int(node[-1])])


class BetweenBounds(nn.Module):
    """Runs the layers between two bounds that it computes from the sizes of its input."""

    def __init__(self, bounds: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.ReLU(), nn.Tanh(), nn.Sigmoid(), nn.Tanh()] * 2)
        self.bounds = bounds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        height, width = x.shape[2:]
        first, last = self.bounds(height, width)
        for layer in self.layers[first:last]:
            x = layer(x)
        return x + 1


@pytest.mark.parametrize(
    ("bounds", "example", "others"),
    [
        (lambda h, w: (h, w), (3, 2), [(3, 5), (1, 2)]),
        (lambda h, w: (h + 0, w + 0), (3, 2), [(3, 5), (1, 2)]),
        (lambda h, w: (h // 10, w // 16), (32, 32), [(32, 80), (10, 80)]),
        (lambda h, w: ((h + 16) // 16, h * h // 512), (32, 32), [(64, 32)]),
        (lambda h, w: ((h + 8) // 16, h // 12), (32, 32), [(36, 32)]),
        (lambda h, w: (max(h, w), min(h, w)), (3, 3), [(3, 5), (2, 6)]),
        (lambda h, w: (math.ceil(h / 10), math.floor(w / 16)), (32, 32), [(32, 80), (10, 80)]),
        (lambda h, w: (int(h * 0.1), int(w * 0.1)), (32, 32), [(32, 80), (10, 80)]),
    ],
)
def test_between_computed_bounds_that_hold_nothing_on_the_example(
    bounds: Any, example: tuple[int, int], others: list[tuple[int, int]]
) -> None:
    model = BetweenBounds(bounds).eval()
    graph = featx.trace(model, torch.rand(1, 3, *example))
    for size in (example, *others):
        x = torch.rand(1, 3, *size)
        try:
            found = graph(x)
        except featx.SpecializationError:
            continue
        assert torch.equal(found, model(x))
