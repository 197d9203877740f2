"""Sizes that a graph states by literals."""

from __future__ import annotations

import pytest
import torch

import featx
from featx.ir.literal_sizes import literal_sizes


class Reads(torch.nn.Module):
    def __init__(self, how: str, place: int) -> None:
        super().__init__()
        self.how, self.place = how, place

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        made = {
            "numbers": lambda: x.view(rows, -1, 4),
            "a tuple": lambda: x.reshape((rows, -1, 4)),
            "transposed": lambda: x.view(rows, -1, 4).transpose(-1, 0).contiguous(),
            "another dtype": lambda: x.view(torch.int32),
            "a sum": lambda: x.view(rows, -1, 4).sum(1),
        }[self.how]()
        return made + made.shape[self.place]


@pytest.mark.parametrize(
    ("how", "place", "expected"),
    [
        ("numbers", 2, [4]), ("numbers", -1, [4]), ("numbers", 1, []), ("numbers", 0, []), ("a tuple", 2, [4]),
        ("transposed", 0, [4]), ("transposed", 2, []), ("another dtype", 1, []), ("a sum", 1, []),
    ],
)  # fmt: skip
def test_sizes_are_known_where_a_view_has_them_as_numbers(how: str, place: int, expected: list[int]) -> None:
    graph = featx.trace(Reads(how, place), example_inputs=torch.rand(2, 8)).graph
    assert list(literal_sizes(graph).values()) == expected
