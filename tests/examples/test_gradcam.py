"""The Grad-CAM example: heat maps are those that plain hooks give, and the scenes are what they say."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import featx

PATH = Path(__file__).parents[2] / "examples" / "gradcam.py"


@pytest.fixture(scope="module")
def example() -> Any:
    specification = importlib.util.spec_from_file_location("example_gradcam", PATH)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def cam_by_hooks(model: Any, module: Any, images: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    seen: list[torch.Tensor] = []
    handle = module.register_forward_hook(lambda _module, _inputs, output: seen.append(output))
    logits = model(images)
    handle.remove()
    (gradient,) = torch.autograd.grad(logits[torch.arange(len(images)), classes].sum(), seen[0])
    weights = gradient.mean(dim=(2, 3))
    return torch.relu(torch.einsum("nc,nchw->nhw", weights, seen[0])).detach()


def test_heat_maps_are_those_of_plain_hooks(example: Any) -> None:
    torch.manual_seed(0)
    network = example.Network((4, 6, 8)).eval()
    extractor = featx.create_feature_extractor(network, {"stages.*": "*", "output": "logits"})
    images, classes = torch.rand(3, 1, 48, 48), torch.tensor([1, 5, 9])
    heat, logits = example.grad_cam(extractor, images, classes)
    assert list(heat) == ["0", "1", "2"]
    for key, value in heat.items():
        expected = cam_by_hooks(network, network.stages[int(key)], images, classes)
        torch.testing.assert_close(value, expected)
        assert value.max() > 0
    assert torch.equal(logits, network(images))


def test_digits_of_a_scene_are_at_their_corners_and_do_not_overlap(example: Any) -> None:
    digits = (torch.full((20, 16, 16), 2.0), torch.arange(20) % 10)
    scenes, classes, corners = example.make_scenes(50, digits, torch.Generator().manual_seed(0))
    assert (classes[:, 0] != classes[:, 1]).all()
    assert torch.equal((scenes == 2.0).sum((1, 2, 3)), torch.full((50,), 2 * 16 * 16))
    for scene, places in zip(scenes, corners.tolist(), strict=True):
        for top, left in places:
            assert (scene[0, top : top + 16, left : left + 16] == 2.0).all()


def test_maximum_on_the_digit_is_found(example: Any) -> None:
    heat = torch.zeros(3, 48, 48)
    heat[0, 10, 20] = heat[1, 9, 20] = heat[2, 25, 35] = 1.0
    corners = torch.tensor([[10, 20]] * 3)
    assert example.on_digit(heat, corners).tolist() == [True, False, True]


@pytest.mark.slow
def test_example_runs(
    example: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["gradcam.py", "--steps", "3", "--output", str(tmp_path / "figure.png")])
    example.main()
    assert "stage 2: " in capsys.readouterr().out
    assert (tmp_path / "figure.png").stat().st_size > 10_000
