"""Lengths of which the model wants several to be equal, wherever they are: runs with one of them alone fail."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import featx

TOGETHER = "free, with all others of this length"


class Matching(nn.Module):
    """Two sets of points, with descriptors (B, C, N), places (B, N, 2) and scores (B, N) each, as in SuperGlue."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.out = nn.Sequential(nn.Conv1d(3, 8, 1), nn.ReLU()), nn.Conv1d(8, 8, 1)

    def encode(self, places: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return self.encoder(torch.cat([places.transpose(1, 2), scores.unsqueeze(1)], 1))

    def forward(self, *points: torch.Tensor) -> torch.Tensor:
        first, places, scores, second, other_places, other_scores = points
        if places.shape[1] == 0 or other_places.shape[1] == 0:
            return places.new_zeros(places.shape[0], 8)
        first = first + self.encode(places, scores)
        second = second + self.encode(other_places, other_scores)
        return self.out(first).mean(2) + self.out(second).mean(2)


def two_sets(*counts: int) -> tuple[torch.Tensor, ...]:
    return tuple(
        each for count in counts for each in (torch.randn(2, 8, count), torch.rand(2, count, 2), torch.rand(2, count))
    )


def returned_last(model: nn.Module, name: str, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    found: list[torch.Tensor] = []
    handle = model.get_submodule(name).register_forward_hook(lambda module, args, output: found.append(output.clone()))
    model(*inputs)
    handle.remove()
    return found[-1]


@pytest.mark.parametrize("counts", [(6, 7), (6, 6)], ids=["other counts", "one count"])
def test_points_at_different_axes_may_be_more_or_fewer(counts: tuple[int, int]) -> None:
    model = Matching().eval()
    extractor = featx.create_feature_extractor(model, ["encoder"], example_inputs=two_sets(*counts))
    assert extractor.free_dims is not None
    assert extractor.free_dims.of["points[0]"][2] == TOGETHER
    for others in ((9, 5), (9, 9), (6, 5), (3, 8)):
        inputs = two_sets(*others)
        assert torch.equal(extractor(*inputs)["encoder"], returned_last(model, "encoder", inputs))


def compared_in_c(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    are_equal = [0] * rows.shape[1] == [0] * columns.shape[2]
    return rows.sum(1) + columns.sum(2) if are_equal else rows.sum(1) * columns.sum(2)


def compared(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    are_equal = rows.shape[1] == columns.shape[2]
    return rows.sum(1) + columns.sum(2) if are_equal else rows.sum(1) * columns.sum(2)


@pytest.mark.parametrize("function", [compared_in_c, compared])
def test_lengths_that_are_free_while_they_are_equal_are_checked_to_be(
    function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    traced = featx.trace(function, torch.rand(2, 6, 3), torch.rand(2, 3, 6))
    rows, columns = torch.rand(2, 9, 3), torch.rand(2, 3, 9)
    assert torch.equal(traced(rows, columns), function(rows, columns))
    with pytest.raises(featx.SpecializationError, match="dimension 2 of input 'columns' is as long as dimension 1 of"):
        traced(rows, torch.rand(2, 3, 8))


def test_sides_of_an_image_that_only_may_be_a_square_are_free_together() -> None:
    def turned(x: torch.Tensor) -> torch.Tensor:
        return x + x.transpose(1, 2) if [0] * x.shape[1] == [0] * x.shape[2] else x

    traced = featx.trace(turned, torch.rand(2, 6, 6))
    x = torch.rand(3, 9, 9)
    assert torch.equal(traced(x), turned(x))
    with pytest.raises(featx.SpecializationError):
        traced(torch.rand(3, 9, 8))
