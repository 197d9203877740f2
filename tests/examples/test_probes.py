"""The probing example: features are those that plain hooks give, and a probe reads what is linear."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

PATH = Path(__file__).parents[2] / "examples" / "probes.py"


@pytest.fixture(scope="module")
def example() -> Any:
    specification = importlib.util.spec_from_file_location("example_probes", PATH)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_features_are_the_averages_of_what_hooks_see(example: Any) -> None:
    torch.manual_seed(0)
    network = example.Network(width=6, depth=3).eval()
    images = torch.rand(4, 1, 14, 14)
    seen: dict[str, torch.Tensor] = {}
    for name in ("stem", "blocks.0", "blocks.1", "blocks.2"):
        network.get_submodule(name).register_forward_hook(
            lambda _module, _inputs, output, name=name: seen.update({name: output.mean(dim=(2, 3))})
        )
    with torch.no_grad():
        network(images)
        expected = dict(seen)  # the extractor runs the hooks too
        features = example.create_probed(network)(images)
    assert list(features) == ["stem", "blocks.0", "blocks.1", "blocks.2"]
    for name, value in features.items():
        assert torch.equal(value, expected[name])


def test_probe_reads_a_linear_feature_and_no_random_one(example: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    classes = torch.randint(2, (600,), generator=generator)
    is_test = torch.arange(600) >= 400
    noise = torch.randn(600, 5, generator=generator)
    linear = noise.clone()
    linear[:, 2] += 10.0 * classes
    assert example.probe(linear, classes, is_test) == 1.0
    assert example.probe(noise, classes, is_test) < 0.6


def test_images_hold_each_digit_once(example: Any) -> None:
    images, classes = example.make_images(torch.Generator().manual_seed(0), copies=2)
    assert images.shape == (2 * 1797, 1, 14, 14)
    assert torch.equal(classes[:1797], classes[1797:])
    torch.testing.assert_close(images[:1797].sum((1, 2, 3)), images[1797:].sum((1, 2, 3)))
    assert not torch.equal(images[:1797], images[1797:])


@pytest.mark.slow
def test_example_runs(
    example: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["probes.py", "--steps", "3", "--output", str(tmp_path / "figure.png")])
    network = example.Network
    monkeypatch.setattr(example, "Network", lambda: network(width=4, depth=2))
    example.main()
    assert "blocks.1 " in capsys.readouterr().out
    assert (tmp_path / "figure.png").stat().st_size > 10_000
