"""Lengths of which the model wants several to be equal, wherever they are: runs with one of them alone fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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


def whole_shapes(image: torch.Tensor, places: torch.Tensor) -> bool:
    return places.shape[1:3] == image.shape[2:]


def each_length(image: torch.Tensor, places: torch.Tensor) -> bool:
    return places.shape[1] == image.shape[2] and not places.shape[2] != image.shape[3]  # noqa: SIM202


def products(image: torch.Tensor, places: torch.Tensor) -> bool:
    return places.shape[1] * places.shape[2] == image.shape[2] * image.shape[3]


def lengths_in_c(image: torch.Tensor, places: torch.Tensor) -> bool:
    return all([0] * places.shape[dim] == [0] * image.shape[dim + 1] for dim in (1, 2))


Matches = Callable[[torch.Tensor, torch.Tensor], bool]


class Located(nn.Module):
    """Takes images (B, C, H, W) and places (B, H, W, 2), and refuses others by `assert`, `torch._assert` or `raise`."""

    def __init__(self, matches: Matches, how: str = "assert") -> None:
        super().__init__()
        self.out, self.matches, self.how = nn.Linear(8, 8), matches, how

    def forward(self, image: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        matches = self.matches(image, places)
        if self.how == "torch":
            torch._assert(matches, "other sizes")
        elif self.how == "raise" and not matches:
            raise ValueError("other sizes")
        assert matches, f"{image.shape} and {places.shape}"
        return self.out(image.mean((2, 3))) + places.mean((1, 2, 3))[:, None]


class HasLocated(nn.Module):
    """Reads sizes, so that other ones are tried, around a module that is kept whole."""

    def __init__(self, located: Located) -> None:
        super().__init__()
        self.located = located

    def forward(self, image: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        return self.located(image, places) * (image.shape[0] / places.shape[0])


MODELS: dict[str, Callable[[], nn.Module]] = {
    "shapes": lambda: Located(whole_shapes),
    "torch._assert": lambda: Located(whole_shapes, "torch"),
    "raise": lambda: Located(whole_shapes, "raise"),
    "each length": lambda: Located(each_length),
    "products": lambda: Located(products),
    "in C": lambda: Located(lengths_in_c),
    "raise in C": lambda: Located(lengths_in_c, "raise"),
    "in a module kept whole": lambda: HasLocated(Located(whole_shapes)),
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("sides", [(6, 5), (6, 6), (8, 5)], ids=["image", "square", "as high as channels"])
def test_sizes_of_several_inputs_that_an_assertion_wants_to_match(sides: tuple[int, int], model: str) -> None:
    located = MODELS[model]().eval()
    example = torch.rand(3, 8, *sides), torch.rand(3, *sides, 2)
    extractor = featx.create_feature_extractor(located, ["output"], example_inputs=example)
    image, places = torch.rand(4, 8, 9, 7), torch.rand(4, 9, 7, 2)
    assert torch.equal(extractor(image, places)["output"], located(image, places))
    wrong = torch.rand(4, 9, 8, 2)
    with pytest.raises((AssertionError, ValueError)):
        located(image, wrong)
    with pytest.raises((featx.SpecializationError, AssertionError, ValueError)):
        extractor(image, wrong)


def test_without_source_an_error_counts_as_one_that_the_model_raises() -> None:
    names: dict[str, Any] = {"__name__": "without_source"}
    exec(  # the lists are compared by C code
        "def added(rows, columns):\n"
        "    if [0] * rows.shape[0] != [0] * columns.shape[1]:\n"
        "        raise ValueError('other sizes')\n"
        "    return rows.sum() + columns.sum()\n",
        names,
    )
    added = names["added"]
    traced = featx.trace(added, torch.rand(6, 2), torch.rand(2, 6))
    rows, columns = torch.rand(9, 2), torch.rand(2, 9)
    assert torch.equal(traced(rows, columns), added(rows, columns))
    with pytest.raises(featx.SpecializationError):
        traced(rows, torch.rand(2, 8))


def test_sides_of_one_input_that_an_assertion_wants_to_be_equal() -> None:
    def mean_of_squares(x: torch.Tensor) -> torch.Tensor:
        assert x.shape[1] == x.shape[2]
        return x.mean((1, 2))

    traced = featx.trace(mean_of_squares, torch.rand(2, 6, 6))
    x = torch.rand(3, 9, 9)
    assert torch.equal(traced(x), mean_of_squares(x))
    with pytest.raises(featx.SpecializationError):
        traced(torch.rand(3, 9, 8))


class KeyValueCache(nn.Module):
    """Attends to the keys and values of earlier calls; with more than one token, to no later ones."""

    def __init__(self) -> None:
        super().__init__()
        self.keys_and_values = nn.Linear(8, 16)

    def forward(self, x: torch.Tensor, past: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        keys, values = self.keys_and_values(x).chunk(2, -1)
        keys, values = torch.cat([past[0], keys], 1), torch.cat([past[1], values], 1)
        count, length = x.shape[1], keys.shape[1]
        mask = torch.ones(count, length, dtype=torch.bool).tril(length - count) if count > 1 else None
        return nn.functional.scaled_dot_product_attention(x, keys, values, attn_mask=mask)


@pytest.mark.parametrize("length", [1, 2])
def test_keys_and_values_may_have_another_length_where_they_have_that_of_the_tokens(length: int) -> None:
    model = KeyValueCache().eval()
    x, past = torch.rand(2, 1, 8), (torch.rand(2, length, 8), torch.rand(2, length, 8))
    extractor = featx.create_feature_extractor(model, ["output"], example_inputs=(x, past), adaptive=False)
    for other in (1, 3, 7):
        given = torch.rand(2, 1, 8), (torch.rand(2, other, 8), torch.rand(2, other, 8))
        assert torch.equal(extractor(*given)["output"], model(*given))
    with pytest.raises(featx.SpecializationError):
        extractor(torch.rand(2, 2, 8), past)
