"""`torch.FloatTensor(n, 1)` and the like with traced sizes: no mode of torch is told of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import featx

X, LONGER = torch.randn(3, 4), torch.randn(5, 4)


class Makes(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.layer, self._function = nn.Linear(4, 4), function

    def forward(self, x: torch.Tensor) -> Any:
        return self._function(self.layer(x))


def of_size(x: torch.Tensor) -> torch.Tensor:
    return x * torch.Tensor(x.size(0), 1).fill_(2)


def of_the_whole_size(x: torch.Tensor) -> torch.Tensor:
    return x + torch.DoubleTensor(x.size()).zero_()


def drawn(x: torch.Tensor) -> torch.Tensor:
    return x * torch.FloatTensor(x.size(0), 1).uniform_(0, 1)


def of_a_list(x: torch.Tensor) -> torch.Tensor:
    return x * torch.FloatTensor([x.shape[0], x.shape[0] * 0.5, 1, 2.5])


def of_a_tuple(x: torch.Tensor) -> torch.Tensor:
    return x * torch.LongTensor((x.shape[0],))


def asks_for_the_class(x: torch.Tensor) -> torch.Tensor:
    kinds = {torch.Tensor: 1, torch.LongTensor: 2}
    x = x if isinstance(x, torch.Tensor) else torch.zeros(1)
    return torch.Tensor.add(x, kinds[torch.Tensor]) + x.type(torch.LongTensor)


def plain(x: torch.Tensor) -> torch.Tensor:
    return x * torch.FloatTensor([1, 2, 3, 4]) + torch.Tensor(4).fill_(1)


def in_a_try(x: torch.Tensor) -> torch.Tensor:
    try:
        factors = torch.FloatTensor([x.shape[0], 1, 2, 3])
    except RuntimeError:
        factors = torch.zeros(1)
    return x * factors


FUNCTIONS = [of_size, of_the_whole_size, drawn, of_a_list, of_a_tuple, asks_for_the_class, plain]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_batch_is_free(function: Callable[[torch.Tensor], Any]) -> None:
    model = Makes(function).eval()
    traced = featx.trace(model, X)
    extractor = featx.create_feature_extractor(model, ["layer", "output"], example_inputs=X)
    for x in (X, LONGER, X[:1]):
        torch.manual_seed(0)
        expected = model(x)
        for call in (traced, lambda x: extractor(x)["output"]):
            torch.manual_seed(0)
            found = call(x)
            assert torch.equal(found, expected)
            assert found.dtype == expected.dtype


@pytest.mark.slow
def test_lengths_that_are_compared_and_returned() -> None:
    class Regulates(nn.Module):
        """Repeats tokens as often as an input says, as FastSpeech2 does."""

        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(9, 4), nn.Linear(4, 2)

        def forward(self, tokens: torch.Tensor, counts: torch.Tensor) -> Any:
            rows, lengths = [], []
            for row, count in zip(self.embed(tokens), counts, strict=True):
                rows.append(torch.cat([each.expand(int(n.item()), -1) for each, n in zip(row, count, strict=True)]))
                lengths.append(rows[-1].shape[0])
            longest = max(lengths)
            padded = torch.stack([nn.functional.pad(each, (0, 0, 0, longest - each.size(0))) for each in rows])
            length = torch.LongTensor(lengths)
            mask = torch.arange(int(length.max()))[None] >= length[:, None]
            return self.head(padded).masked_fill(mask[..., None], 0), length

    model = Regulates().eval()
    tokens, counts = torch.randint(0, 9, (2, 3)), torch.tensor([[1, 2, 1], [2, 1, 1]])
    traced = featx.trace(model, tokens, counts)
    for given in (counts, counts + 1):
        for found, expected in zip(traced(tokens, given), model(tokens, given), strict=True):
            assert torch.equal(found, expected)


def test_in_a_try_the_size_is_that_of_the_example() -> None:
    model = Makes(in_a_try).eval()
    traced = featx.trace(model, X)
    assert torch.equal(traced(X), model(X))
    with pytest.raises(featx.SpecializationError):
        traced(LONGER)


def test_what_is_an_error_stays_one() -> None:
    model = Makes(lambda x: x * torch.FloatTensor([x.shape[0]], 2)).eval()
    with pytest.raises(TypeError):
        featx.trace(model, X)
