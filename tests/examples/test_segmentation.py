"""The segmentation example: maps of the right strides and values, a score, and a run."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torchvision.models import mobilenet_v3_small

PATH = Path(__file__).parents[2] / "examples" / "segmentation.py"


@pytest.fixture(scope="module")
def example() -> Any:
    specification = importlib.util.spec_from_file_location("example_segmentation", PATH)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_backbone_gives_the_maps_of_the_model(example: Any) -> None:
    model = mobilenet_v3_small(weights=None).eval()
    images = torch.rand(2, 3, 64, 64)
    segmenter = example.Segmenter(model, images).eval()
    with torch.no_grad():
        maps = segmenter.backbone(images)
        expected = [images] + [model.features[:end](images) for end in (1, 2, 4, 9, 13)]
        logits = segmenter(images)
    assert [64 // value.shape[-1] for value in maps] == list(example.STRIDES)
    assert all(torch.equal(one, other) for one, other in zip(maps, expected, strict=True))
    assert logits.shape == (2, len(example.CLASSES), 64, 64)


def test_mean_iou_is_the_one_counted_by_hand(example: Any) -> None:
    truth = torch.tensor([[[0, 0, 1, 1]]])
    found = torch.tensor([[[0, 1, 1, 1]]])
    assert example.mean_iou(found, truth) == pytest.approx((1 / 2 + 2 / 3) / 2)
    assert example.mean_iou(truth, truth) == 1


def test_masks_are_where_the_digits_were_pasted(example: Any) -> None:
    images, truth = example.compose(4)
    assert all(len(labels.unique()) == 3 for labels in truth)  # the background and two digits
    for image, labels in zip(images, truth, strict=True):
        for label in labels.unique()[1:]:
            pasted = image[:, labels == label]
            assert (pasted == pasted[:, :1]).all()


@pytest.mark.slow
def test_example_runs_and_draws(
    example: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "figure.png"
    argv = ["segmentation.py", "--steps", "4", "--images", "4", "--output", str(path)]
    monkeypatch.setattr(sys, "argv", argv)
    example.main()
    assert path.stat().st_size > 10_000
    assert "mean IoU" in capsys.readouterr().out
