"""What Python decides by sizes and values: followed, checked at run time, or read anew in each call."""

from __future__ import annotations

import pytest
import torch
from agreement import agree, image, same
from torch import nn

import featx


class Branch(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] > 3 else x + 1


def test_branch_on_a_size_holds_on_its_side_and_is_checked_on_the_other() -> None:
    traced = agree(Branch(), (image(1),), (image(2),), (image(3, 6),))
    for batch in (4, 9):
        with pytest.raises(featx.SpecializationError):
            traced(image(batch))
    assert same(featx.trace(Branch(), image(4))(image(4)), image(4) * 2)


class OnValue(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum() > 0 else x - 1


def test_branch_on_a_value_holds_for_its_answer_and_is_checked_for_the_other() -> None:
    model = OnValue()
    traced = agree(model, (torch.ones(2, 3),), (torch.full((4, 5), 0.5),))
    with pytest.raises(featx.SpecializationError):
        traced(-torch.ones(2, 3))
    other = featx.trace(model, -torch.ones(2, 3))
    assert same(other(-torch.ones(2, 3)), -torch.ones(2, 3) - 1)


class LargerSize(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ones(max(x.shape), min(x.shape[0], 3))


def test_maximum_of_sizes_is_right_or_refused_at_every_size() -> None:
    model = LargerSize()
    traced = agree(model, (image(2, 5),))
    for batch, width in ((1, 5), (2, 6), (5, 2), (4, 9), (3, 5)):
        try:
            result = traced(image(batch, width))
        except featx.SpecializationError:
            continue
        assert same(result, model(image(batch, width)))


class Loop(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for row in range(x.shape[0]):
            x = x + row
        return x


def test_loop_over_a_size_fixes_it_and_leaves_the_others_free() -> None:
    model = Loop()
    traced = agree(model, (image(3),), (image(3, 9),))
    for batch in (2, 4):
        with pytest.raises(featx.SpecializationError):
            traced(image(batch))


class Slices(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half = x.shape[1] // 2
        return torch.cat([x[:, half:], x[:, :half]], 1) * (x.shape[0] / half)


def test_arithmetic_on_sizes_is_followed_to_other_sizes() -> None:
    agree(Slices(), (image(2, 4),), (image(3, 4),), (image(2, 8),), (image(5, 7),))


class FactoryOfSize(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(x.shape[0], 1, dtype=x.dtype, device=x.device)
        place = torch.arange(x.size(1), dtype=x.dtype)
        return x + mask + place


def test_tensors_made_of_sizes_are_made_anew_at_other_sizes() -> None:
    agree(FactoryOfSize(), (image(2),), (image(5),), (image(3, 7),))


class Unpacked(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, width = x.shape
        return x.reshape(batch * width, 1).expand(-1, batch).reshape(-1, width)


def test_unpacked_shape_follows_the_input() -> None:
    agree(Unpacked(), (image(2),), (image(3, 6),))


class ChunkLoop(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum((part.mean() for part in x.split(1)), torch.zeros(()))


def test_number_of_pieces_that_a_loop_runs_over_is_checked() -> None:
    traced = agree(ChunkLoop(), (image(3),), (image(3, 8),))
    with pytest.raises(featx.SpecializationError):
        traced(image(4))


class Item(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x.max().item()


def test_item_is_read_again_in_each_call() -> None:
    agree(Item(), (image(2),), (image(2, seed=3),), (image(5, 6),))


def test_extractor_says_which_dimensions_are_free() -> None:
    extractor = featx.create_feature_extractor(Loop(), ["add"], example_inputs=image(3))
    first, second = extractor.free_dims.of["x"]
    assert first.startswith("fixed")
    assert second == "free"


class OnHistory(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        return x * 2 if x.grad_fn is not None else x


def test_module_that_reads_the_history_of_a_tensor_is_kept_whole() -> None:
    with pytest.raises(featx.TraceError, match="grad_fn"):
        featx.trace(OnHistory(), image(2))
    model = nn.Sequential(OnHistory(), nn.ReLU())
    extractor = featx.create_feature_extractor(model, ["0", "1"], example_inputs=image(2))
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            assert same(extractor(image(3))["0"], model[0](image(3)))


class ReadsMemory(nn.Module):
    """Asks for an attribute of its input, and does what no graph can: it is kept whole."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2 if x.requires_grad else x * 3
        x.untyped_storage()
        return y


class AsksAgain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = ReadsMemory()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        return y + 1 if x.requires_grad else y + 2


def test_check_that_was_taken_back_with_a_module_is_made_again() -> None:
    model, x = AsksAgain(), torch.rand(3)
    traced = featx.trace(model, x)
    assert torch.equal(traced(x), model(x))
    with pytest.raises(featx.SpecializationError, match="requires_grad"):
        traced(x.clone().requires_grad_())
