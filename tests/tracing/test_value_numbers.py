"""Numbers that come from values, and that C code reads: a list is indexed, a list repeated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import featx

FIRST, THIRD, TWO = torch.eye(4)[:1], torch.eye(4)[2:3], torch.tensor([[1.0, 0, 1, 0]])


class Scaled(nn.Module):
    """Multiplies by what a list holds at a place that depends on the values of the input."""

    factors = (1.0, 2.0, 3.0, 4.0)

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def place(self, x: torch.Tensor) -> Any:
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.factors[self.place(x)]


class ByItem(Scaled):
    def place(self, x: torch.Tensor) -> Any:
        return x[0].argmax().item()


class ByList(Scaled):
    def place(self, x: torch.Tensor) -> Any:
        return x.argmax(1).tolist()[0]


class ByLengthOfNonzero(Scaled):
    def place(self, x: torch.Tensor) -> Any:
        return x[0].nonzero().shape[0]


class ByLengthOfSelection(Scaled):
    def place(self, x: torch.Tensor) -> Any:
        return len(x[x > 0])


class ByCountOfSelection(Scaled):
    def place(self, x: torch.Tensor) -> Any:
        return torch.masked_select(x, x > 0).numel()


@pytest.mark.parametrize("kind", [ByItem, ByList, ByLengthOfNonzero, ByLengthOfSelection, ByCountOfSelection])
def test_number_that_c_code_reads_is_checked(kind: type[Scaled]) -> None:
    model = kind().eval()
    extractor = featx.create_feature_extractor(model, ["mul"], example_inputs=FIRST, adaptive=False)
    refused = 0
    for x in (FIRST, FIRST * 2, THIRD, TWO):
        try:
            assert torch.equal(extractor(x)["mul"], model(x))
        except featx.SpecializationError:
            refused += 1
            assert model.place(x) != model.place(FIRST)
    assert refused


class ByModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.heads[x[0].argmax().item()](x) + 1


def test_adaptive_extractor_takes_the_other_cases() -> None:
    model = ByModule().eval()
    extractor = featx.create_feature_extractor(model, ["add"], example_inputs=FIRST, adaptive=True)
    for x in (FIRST, THIRD, TWO):
        assert torch.equal(extractor(x)["add"], model(x))


class Followed(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x.sum().item() + x[x > 0].shape[0]


def test_number_that_only_torch_reads_stays_free() -> None:
    extractor = featx.create_feature_extractor(Followed(), ["add"], example_inputs=FIRST)
    for x in (FIRST, THIRD * 3, TWO):
        assert torch.equal(extractor(x)["add"], Followed()(x))
