"""Samples of several parts: an image and its label, or several inputs, of which none is lost without a word."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import featx

VALUES = torch.rand(6, 4, generator=torch.Generator().manual_seed(0))
MASKS = (VALUES > 0.5).float()


class Masked(nn.Module):
    """Sums what a mask leaves; without one, all."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Identity()

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return self.layer((x if mask is None else x * mask).sum(1, keepdim=True))


class OfOne(nn.Module):
    """Has one input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x * 2)


def extracted(model: nn.Module, samples: Any, folder: Path, **options: Any) -> featx.FeatureTable:
    return featx.extract(
        model.eval(), {"layer": "y"}, samples, folder / "features", workers=0, progress=False, **options
    )


@pytest.mark.parametrize("has_name", [True, False])
def test_load_gets_the_whole_sample(has_name: bool, tmp_path: Path) -> None:
    def load(sample: Any) -> Any:
        x, mask = sample
        return {"x": x, "mask": mask} if has_name else (x, mask)

    table = extracted(Masked(), TensorDataset(VALUES, MASKS), tmp_path, load=load)
    assert torch.equal(table.tensor("y"), Masked()(VALUES, MASKS))


@pytest.mark.parametrize("kind", [tuple, list])
@pytest.mark.parametrize("is_array", [True, False])
def test_a_part_that_may_be_an_input_is_not_left_out(kind: Any, is_array: bool, tmp_path: Path) -> None:
    samples = [
        kind((x.numpy(), mask.numpy()) if is_array else (x, mask)) for x, mask in zip(VALUES, MASKS, strict=True)
    ]
    with pytest.raises(featx.FeatxError, match=r"part 2 of the shape \(4,\) may be an input of the model.*load="):
        extracted(Masked(), samples, tmp_path, transform=torch.as_tensor)


@pytest.mark.parametrize("label", [3, "a cat", torch.tensor(3), torch.tensor([3]), {"boxes": torch.rand(2, 4)}, None])
def test_a_label_is_left_out(label: Any, tmp_path: Path) -> None:
    table = extracted(Masked(), [(x, label) for x in VALUES], tmp_path, transform=nn.Identity())
    assert torch.equal(table.tensor("y"), Masked()(VALUES))


def test_a_part_is_a_label_where_the_model_has_one_input(tmp_path: Path) -> None:
    table = extracted(OfOne(), TensorDataset(VALUES, MASKS), tmp_path, transform=nn.Identity())
    assert torch.equal(table.tensor("y"), VALUES * 2)


def test_labels_that_change_are_no_other_job(tmp_path: Path) -> None:
    def noisy(value: torch.Tensor) -> torch.Tensor:
        return value + torch.rand(4)

    extracted(OfOne(), [(x, 0) for x in VALUES], tmp_path, transform=noisy)
    table = extracted(OfOne(), [(x, 1) for x in VALUES], tmp_path, transform=noisy)
    assert len(table) == 6
