"""Names of items that code takes out of results: each means what it means to torchvision, by value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree
from torchvision.models import feature_extraction

import featx

X = torch.rand(2, 6, generator=torch.Generator().manual_seed(0))


class Splitting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.first(x).chunk(2, -1)
        return torch.cat([parts[1], parts[0] * 2], -1)


class ThroughALayer(Splitting):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.first(x).chunk(2, -1)
        return self.second(parts[1]) + parts[0]


class TakesOneTwice(Splitting):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.first(x).chunk(2, -1)
        return parts[0] * parts[0].sigmoid() + parts[1]


class TakesOneInVain(Splitting):
    """As the block of Res2Net: `sp = spx[0]  # redundant`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = torch.split(self.first(x), 2, 1)
        found = parts[0]
        kept = []
        for index in range(3):
            found = parts[index] if index == 0 else found + parts[index]
            kept.append(found)
        return torch.cat([*kept, parts[-1]], 1)


class TakesASlice(Splitting):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.first(x).split(2, 1)
        rest = parts[1:]
        return rest[1] - rest[0] + parts[0]


class UnpacksLater(Splitting):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.first(x).chunk(2, -1)
        y = x.sum()
        one, other = parts
        return other * y + one


class UnpacksAtOnce(Splitting):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, other = self.first(x).chunk(2, -1)
        return other.relu() + one


class InASubmodule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential(Splitting(), TakesOneInVain())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, other = self.parts(x).chunk(2, 1)
        return one - other


KINDS = [
    Splitting, ThroughALayer, TakesOneTwice, TakesOneInVain, TakesASlice, UnpacksLater, UnpacksAtOnce, InASubmodule,
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_each_name_that_torchvision_lists_has_its_value(kind: type[nn.Module]) -> None:
    model = kind().eval()
    names = feature_extraction.get_graph_node_names(model)[1]
    with torch.no_grad():
        expected = feature_extraction.create_feature_extractor(model, names)(X)
        found = featx.create_feature_extractor(model, names, example_inputs=X)(X)
        assert all(same(found[name], expected[name]) for name in names)
        for name in names:  # alone, where fewer modules are looked into
            assert same(featx.create_feature_extractor(model, [name], example_inputs=X)(X)[name], expected[name])


def same(one: Any, other: Any) -> bool:
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(same, one, other))
    return torch.equal(one, other)


class Halving(nn.Module):
    def __init__(self, use: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.use = nn.Linear(6, 6), use

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.use(self.linear(x))


def double_of_a_tuple(parts: Any) -> torch.Tensor:
    return parts[0] * (2 if type(parts) is tuple else 3)


def by_its_type(x: torch.Tensor) -> torch.Tensor:
    parts = x.chunk(2, 1)
    return parts[1] * (2 if type(parts) is tuple else 3)


def by_its_type_in_a_function(x: torch.Tensor) -> torch.Tensor:
    parts = torch.split(x, 3, 1)
    return double_of_a_tuple(parts) + parts[1]


def by_the_type_of_a_slice(x: torch.Tensor) -> torch.Tensor:
    parts = x.chunk(3, 1)
    rest = parts[1:]
    return double_of_a_tuple(rest) + parts[0]


def through_another_name(x: torch.Tensor) -> torch.Tensor:
    parts = x.chunk(2, 1)
    other = parts
    return double_of_a_tuple(other) + parts[0]


def in_a_closure(x: torch.Tensor) -> torch.Tensor:
    parts = x.chunk(2, 1)
    return (lambda: double_of_a_tuple(parts))() + parts[1]


def by_name(x: torch.Tensor) -> torch.Tensor:
    parts = x.chunk(2, 1)
    return double_of_a_tuple(locals()["parts"]) + parts[1]


def in_a_list(x: torch.Tensor) -> torch.Tensor:
    parts = list(map(torch.chunk, [x, x + 1], [3, 3]))
    return double_of_a_tuple(parts[0]) + parts[1][1]


def by_a_library(x: torch.Tensor) -> torch.Tensor:
    parts = x.chunk(2, 1)
    return pytree.tree_leaves({"parts": parts})[1] + parts[0]


TYPE_QUESTIONS = [
    by_its_type, by_its_type_in_a_function, by_the_type_of_a_slice, through_another_name, in_a_closure, by_name,
    in_a_list, by_a_library,
]  # fmt: skip


@pytest.mark.parametrize("use", TYPE_QUESTIONS)
def test_code_that_asks_for_the_type_gets_a_tuple(use: Callable[[torch.Tensor], torch.Tensor]) -> None:
    model = Halving(use)
    assert torch.equal(featx.trace(model, X)(X + 1), model(X + 1))


def test_code_gets_a_tuple() -> None:
    seen: list[Any] = []

    class Looking(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            parts = x.chunk(2, -1)
            seen.append((isinstance(parts, tuple), len(parts), repr(parts)[0], parts + (1,), parts[0] in parts[:1]))
            return torch.cat(parts, 0) + torch.stack(list(parts)).sum()

    traced = featx.trace(Looking(), X)
    assert [(each[0], each[1], each[2], len(each[3])) for each in seen] == [(True, 2, "(", 3)] * len(seen)
    assert torch.equal(traced(X), Looking()(X))
