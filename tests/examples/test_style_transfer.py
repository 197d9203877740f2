"""The style transfer example: its values are those of hooks, and the loss goes down."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchvision.models import vgg11

PATH = Path(__file__).parents[2] / "examples" / "style_transfer.py"


@pytest.fixture(scope="module")
def example() -> Any:
    specification = importlib.util.spec_from_file_location("example_style_transfer", PATH)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_content_and_grams_are_those_of_hooks_that_copy(example: Any) -> None:
    network = vgg11(weights=None).eval()
    images = torch.rand(1, 3, 32, 32)
    seen: dict[str, Tensor] = {}
    handles = [
        network.get_submodule(name).register_forward_hook(lambda *args, name=name: seen.update({name: args[2].clone()}))
        for name in (*example.STYLE, example.CONTENT)
    ]
    with torch.no_grad():
        network(images)
        for handle in handles:
            handle.remove()
        found = example.perceptual(network, images)(images)
    assert torch.equal(found["content"], seen[example.CONTENT])
    assert found["content"].min() < 0  # the ReLU that overwrites it came later
    for name in example.STYLE:
        maps = seen[name][0] - seen[name][0].mean((1, 2), keepdim=True)
        expected = torch.einsum("ihw,jhw->ij", maps, maps) / (maps.shape[1] * maps.shape[2])
        torch.testing.assert_close(found[f"style of {name}"][0], expected)


@pytest.mark.slow
def test_extractor_ends_at_its_deepest_value(example: Any) -> None:
    extractor = example.perceptual(vgg11(weights=None).eval(), torch.rand(1, 3, 32, 32))
    layers = [name for name, module in extractor.named_modules() if isinstance(module, nn.Conv2d)]
    assert layers == ["features.0", "features.3", "features.6", "features.8"]


@pytest.mark.slow
def test_transfer_lowers_the_style_loss_and_draws(
    example: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "figure.png"
    monkeypatch.setattr(sys, "argv", ["style_transfer.py", "--size", "32", "--steps", "12", "--output", str(path)])
    example.main()
    assert path.stat().st_size > 10_000
    styles = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines() if line.startswith("step")]
    assert styles[-1] < styles[0]
