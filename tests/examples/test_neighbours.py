"""The examples of bulk extraction: neighbours of crops, and heads on cached maps."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("faiss")
FOLDER = Path(__file__).parents[2] / "examples"


def example(name: str) -> Any:
    specification = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module
    specification.loader.exec_module(module)
    return module


def test_neighbours_are_those_of_the_cosine() -> None:
    vectors = torch.randn(20, 5, generator=torch.Generator().manual_seed(0))
    centred = torch.nn.functional.normalize(vectors - vectors.mean(0), dim=1)
    similar = (centred @ centred.T).fill_diagonal_(-2)
    assert torch.equal(example("neighbours").nearest(vectors, 3), similar.argsort(1, descending=True)[:, :3])


@pytest.mark.slow
def test_neighbours_are_drawn(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "figure.png"
    monkeypatch.setattr(sys, "argv", ["neighbours.py", "--crops", "5", "--output", str(path)])
    example("neighbours").main()
    text = capsys.readouterr().out
    shares = [int(line.split("%")[0].split()[-1]) for line in text.splitlines() if line.startswith("layer")]
    assert min(shares) > 30  # by chance it is 5
    assert path.stat().st_size > 10_000


@pytest.mark.slow
def test_heads_on_cached_maps_learn_what_others_learn(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "figure.png"
    arguments = ["cached_maps.py", "--samples", "200", "--epochs", "3", "--output", str(path)]
    monkeypatch.setattr(sys, "argv", arguments)
    example("cached_maps").main()
    lines = capsys.readouterr().out.splitlines()
    cached, anew = (line.split(": ")[1].split("%")[0] for line in lines if "after" in line)
    assert abs(float(cached) - float(anew)) < 4.1  # two of 50
    assert path.stat().st_size > 10_000
