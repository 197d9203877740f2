"""Models that keep something between calls find nothing of a trace in it."""

from __future__ import annotations

import functools

import pytest
import torch
from agreement import agree, image, same
from torch import nn

import featx


class Caching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table: torch.Tensor | None = None
        self.by_size: dict[int, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table is None or self.table.shape[0] != x.shape[1]:
            self.table = torch.arange(x.shape[1], dtype=torch.float32) * 2
        return x + self.table


class CachingInDict(Caching):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = x.shape[1]
        if size not in self.by_size:
            self.by_size[size] = torch.ones(size) * 3
        return x + self.by_size[size]


@pytest.mark.parametrize("kind", [Caching, CachingInDict])
def test_cache_in_an_attribute_is_not_poisoned_by_a_trace(kind: type[Caching]) -> None:
    model = kind()
    expected = kind()(image())
    traced = featx.trace(model, image())
    assert model.table is None
    assert model.by_size == {}
    assert same(model(image()), expected)
    assert same(traced(image()), expected)
    assert same(model(image(2, 7)), kind()(image(2, 7)))


@functools.cache
def positions(size: int) -> torch.Tensor:
    return torch.arange(size, dtype=torch.float32)


class Remembering(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + positions(x.shape[1])


def test_cached_function_keyed_by_a_size_is_not_poisoned() -> None:
    positions.cache_clear()
    model = Remembering()
    traced = featx.trace(model, image())
    assert same(model(image()), image() + torch.arange(4.0))
    assert same(traced(image()), image() + torch.arange(4.0))
    assert not positions(4).is_meta
    assert type(positions(4)) is torch.Tensor


def test_einops_can_be_traced_again_and_again() -> None:
    einops = pytest.importorskip("einops")

    class Rearranging(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = einops.rearrange(x, "b (h w) -> b w h", h=2)
            return einops.rearrange(y, "b w h -> (b w) h") * 2

    model = Rearranging()
    for seed in range(3):
        agree(model, (image(2, 6),), (image(2, 6, seed=seed),))
    assert same(model(image(5, 8)), featx.trace(model, image(5, 8))(image(5, 8)))
