"""Sizes that code of Python's own library gets: an OrderedDict as a cache, samples of a seeded generator."""

from __future__ import annotations

import random
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

import featx


class Keeps(nn.Module):
    """Keeps a ramp for each length, as hand-written caches of masks and positions do."""

    def __init__(self, key: Any) -> None:
        super().__init__()
        self.linear, self.key = nn.Linear(4, 2), key
        self.cache: OrderedDict[Any, torch.Tensor] = OrderedDict()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        key = self.key(x)
        if key not in self.cache:
            self.cache[key] = torch.arange(x.shape[0])[:, None] * 0.5
        return self.linear(x) + self.cache[key]


class KeepsLatest(Keeps):
    """Forgets what was used least."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        key = self.key(x)
        if key in self.cache:
            self.cache.move_to_end(key)
        else:
            self.cache[key] = torch.arange(x.shape[0])[:, None] * 0.5
        while len(self.cache) > 2:
            self.cache.popitem(last=False)
        return self.linear(x) + self.cache[key]


KEYS = [lambda x: x.shape[0], lambda x: (x.shape[0], x.dtype), lambda x: str(x.shape[0])]


@pytest.mark.parametrize("kind", [Keeps, KeepsLatest])
@pytest.mark.parametrize("key", KEYS)
def test_ordered_dict_as_a_cache(kind: type[Keeps], key: Any) -> None:
    model = kind(key).eval()
    extractor = featx.create_feature_extractor(model, ["output"], example_inputs=torch.rand(3, 4))
    expected = kind(key).eval()
    expected.load_state_dict(model.state_dict())
    for count in (3, 5, 2, 5, 3):
        x = torch.rand(count, 4)
        try:
            found = extractor(x)["output"]
        except featx.SpecializationError:
            assert count != 3
            continue
        assert torch.equal(found, expected(x))


class Samples(nn.Module):
    """Takes as many numbers out of a hundred as its input has rows, always the same ones for a size."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = sorted(random.Random(0).sample(range(100), x.shape[0]))
        return x * torch.tensor(chosen)[:, None]


def test_a_sample_of_as_many_as_there_are_ends() -> None:
    model = Samples().eval()
    graph = featx.trace(model, torch.rand(6, 4))
    x = torch.rand(6, 4)
    assert torch.equal(graph(x), model(x))
    with pytest.raises(featx.SpecializationError):
        graph(torch.rand(7, 4))
