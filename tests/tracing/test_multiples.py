"""Numbers of samples of which the model takes some alone: those that fill its queue (MoCo)."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import featx


class Queue(nn.Module):
    """Momentum contrast: the keys of a batch replace the oldest ones, and a whole number of batches fills the queue."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.query, self.key, self.out = nn.Linear(3, 4), nn.Sequential(nn.Linear(3, 4), nn.Tanh()), nn.Identity()
        self.register_buffer("queue", torch.rand(4, size))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def enqueue(self, keys: torch.Tensor) -> None:
        count, place = keys.shape[0], int(self.place)
        if self.size % count != 0:  # as an assertion, which pytest would write anew
            raise AssertionError
        self.queue[:, place : place + count] = keys.T
        self.place[0] = (place + count) % self.size

    def forward(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            found = self.key(keys)
        logits = (self.query(queries) * found).sum(1, keepdim=True)
        logits = torch.cat([logits, self.query(queries) @ self.queue.clone()], 1)
        self.enqueue(found)
        return self.out(logits)


@pytest.mark.parametrize("name", ["key", "out"])
@pytest.mark.parametrize("size", [24, 64], ids=["three times", "twice"])
def test_batches_that_the_model_takes_are_free_where_a_multiple_is(size: int, name: str) -> None:
    torch.manual_seed(0)
    model = Queue(size).eval()
    expecting = copy.deepcopy(model)
    found: list[torch.Tensor] = []
    expecting.get_submodule(name).register_forward_hook(lambda module, args, output: found.append(output.clone()))
    extractor = featx.create_feature_extractor(model, [name], example_inputs=(torch.rand(4, 3), torch.rand(4, 3)))
    assert extractor.free_dims is not None
    assert extractor.free_dims.of["keys"][0] == "free, if the model takes that length"
    for count in (4, 8, 1, 2, 4):
        inputs = torch.rand(count, 3), torch.rand(count, 3)
        expecting(*inputs)
        assert torch.equal(extractor(*inputs)[name], found[-1])
    inputs = torch.rand(5, 3), torch.rand(5, 3)
    with pytest.raises(AssertionError):
        expecting(*inputs)
    if name == "key":  # which comes before
        assert torch.equal(extractor(*inputs)[name], found[-1])
    else:
        with pytest.raises(featx.SpecializationError):
            extractor(*inputs)
