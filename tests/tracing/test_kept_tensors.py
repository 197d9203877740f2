"""When a trace is over, its tensors are freed at once: those alive would be looked for among all objects there are."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import featx
from featx.tracing.side_effects import kept_tensors

IMAGES = torch.rand(2, 3, 8, 8)


class Recurrent(nn.Module):
    """Returns tuples in tuples, of which one tensor is passed on."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(8, 8, 2, batch_first=True)
        self.conv = nn.Conv2d(3, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, (h, _) = self.rnn(self.conv(x)[:, 0])
        return y[:, -1] + h[-1]


class TakesOneSize(nn.Module):
    """Fails at any other size, with what it has computed in the frame of forward."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        if y.shape[2] != 8:
            raise ValueError(f"8 pixels, please, not {y.shape[2]}")
        return y + y.shape[0]


class FailsAtTheEnd(nn.Module):
    """Fails after the requested value on the example already."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        return y.reshape(7, -1)


class AsksForItsMode(nn.Module):
    """Is traced in each mode, without a second call in the other one, as the graphs are the same."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        return y if self.training else y * 1


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many tensors were alive each time that a trace was dropped, without the collector of garbage."""
    found: list[int] = []
    search = kept_tensors.empty_functions_that_keep

    def count(tensors: list[Any]) -> None:
        found.append(len(tensors))
        search(tensors)

    monkeypatch.setattr(kept_tensors, "empty_functions_that_keep", count)
    gc.collect()
    gc.disable()
    yield found
    gc.enable()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Recurrent, TakesOneSize, FailsAtTheEnd, AsksForItsMode])
def test_extractor_leaves_no_tensor_of_a_trace(kind: type[nn.Module], searches: list[int]) -> None:
    featx.create_feature_extractor(kind().eval(), ["conv"], example_inputs=IMAGES, suppress_diff_warning=True)
    assert searches
    assert sum(searches) == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Recurrent, TakesOneSize, AsksForItsMode])
def test_trace_leaves_no_tensor(kind: type[nn.Module], searches: list[int]) -> None:
    featx.trace(kind().eval(), IMAGES)
    assert searches
    assert sum(searches) == 0
