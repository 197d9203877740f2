"""The detection example: maps are those of the classifier, batch norm stays frozen, and the loss falls."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

PATH = Path(__file__).parents[2] / "examples" / "detection.py"


@pytest.fixture(scope="module")
def example() -> Any:
    specification = importlib.util.spec_from_file_location("example_detection", PATH)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_maps_are_those_of_the_classifier(example: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    models: list[Any] = []

    def kept(weights: None) -> Any:
        models.append(resnet18(weights=weights))
        return models[-1]

    resnet18 = example.resnet18
    monkeypatch.setattr(example, "resnet18", kept)
    torch.manual_seed(0)
    images = torch.rand(2, 3, 128, 128)
    body = example.create_detector(images).backbone.body.eval()
    seen: list[torch.Tensor] = []
    model = models[0].eval()
    for layer in (model.layer2, model.layer3, model.layer4):
        layer.register_forward_hook(lambda _module, _inputs, output: seen.append(output.clone()))
    with torch.no_grad():
        model(images)
        expected = list(seen)
        found = body(images)
    assert list(found) == ["0", "1", "2"]
    assert all(torch.equal(value, other) for value, other in zip(found.values(), expected, strict=True))


@pytest.mark.slow
def test_loss_falls_and_batch_norm_stays(example: Any) -> None:
    torch.manual_seed(0)
    images, targets = example.paste_digits(torch.rand(2, 3, 128, 128), torch.Generator().manual_seed(0))
    detector = example.create_detector(images)
    before = {name: value.clone() for name, value in detector.state_dict().items()}
    losses = example.train(detector, images, targets, steps=12, rate=3e-4)
    assert losses[-1] < 0.9 * losses[0]
    changed = {name for name, value in detector.state_dict().items() if not torch.equal(value, before[name])}
    assert "backbone.body.conv1.weight" in changed
    assert "backbone.neck.layer_blocks.0.0.weight" in changed
    assert not any(".bn" in name or "running_" in name for name in changed)


def test_boxes_hold_what_was_pasted(example: Any) -> None:
    black = torch.zeros(4, 3, 128, 128)
    images, targets = example.paste_digits(black, torch.Generator().manual_seed(0))
    assert not black.any()
    for image, target in zip(images, targets, strict=True):
        ink = image.amax(0)
        assert len(target["boxes"]) == len(target["labels"]) == 3
        for left, top, right, bottom in target["boxes"].int().tolist():
            window = ink[top:bottom, left:right] > 0.3
            assert window[0].any()
            assert window[-1].any()
            assert window[:, 0].any()
            assert window[:, -1].any()
            ink[top:bottom, left:right] = 0
        assert ink.max() <= 0.3 + 1e-6


def test_mean_iou_asks_for_the_same_label(example: Any) -> None:
    boxes = torch.tensor([[0.0, 0.0, 10.0, 10.0], [20.0, 20.0, 30.0, 30.0]])
    truth = [{"boxes": boxes, "labels": torch.tensor([1, 2])}]
    half = torch.tensor([[0.0, 0.0, 10.0, 5.0], [20.0, 20.0, 30.0, 30.0]])
    assert example.mean_iou(truth, truth) == 1.0
    assert example.mean_iou([{"boxes": half, "labels": torch.tensor([1, 2])}], truth) == pytest.approx(0.75)
    assert example.mean_iou([{"boxes": half, "labels": torch.tensor([1, 1])}], truth) == pytest.approx(0.25)
    assert example.mean_iou([{"boxes": boxes[:0], "labels": torch.tensor([])}], truth) == 0.0


@pytest.mark.slow
def test_example_says_when_it_was_trained_too_little(
    example: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["detection.py", "--steps", "2", "--output", str(tmp_path / "figure.png")])
    with pytest.raises(SystemExit, match="did not overfit"):
        example.main()
    assert "mean IoU" in capsys.readouterr().out


@pytest.mark.slow
def test_figure_is_drawn(example: Any, tmp_path: Path) -> None:
    images, targets = example.paste_digits(torch.zeros(4, 3, 128, 128), torch.Generator().manual_seed(0))
    found = [{**target, "scores": torch.ones(3)} for target in targets]
    example.draw(images, found, targets, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000
