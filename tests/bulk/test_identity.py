"""What makes a job another one: each thing on which the features depend, and nothing else."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import Dataset
from torchvision.transforms import transforms as v1
from torchvision.transforms import v2

import featx
from featx import Feature
from featx.fingerprint import fingerprint

from .conftest import make_net, make_photos, pixels


def net_with(activation: nn.Module) -> dict[str, Any]:
    model = nn.Sequential(make_net().conv, activation).eval()
    return {"model": model, "nodes": {"1": Feature("y", pool="avg")}}


def doubled_or_not(factor: float) -> Callable[[Any], Any]:
    return [lambda x: x * 1, lambda x: x * 2][int(factor) - 1]


def scaled(factor: float) -> Callable[[Any], torch.Tensor]:
    return lambda image: pixels(image) * factor


class Scaling:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def apply(self, image: Any) -> torch.Tensor:
        return pixels(image) * self.factor


class Scaled(nn.Module):
    def __init__(self, factor: float, *, as_tensor: bool) -> None:
        super().__init__()
        self.factor = torch.tensor(factor) if as_tensor else factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


class Numbers(Dataset[torch.Tensor]):
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((3, 16, 16), (index + 1) * self.factor)


def run(photos: Path, output: Path, *, model: nn.Module | None = None, nodes: Any = None, **options: Any) -> Any:
    options = {"transform": pixels, "workers": 0, "progress": False, "batch_size": 4, **options}
    source = options.pop("source", photos)
    return featx.extract(make_net() if model is None else model, nodes or {"fc": "y"}, source, output, **options)


# Pairs of jobs that differ in one thing.
PAIRS: dict[str, Callable[[float], dict[str, Any]]] = {
    "closure": lambda k: {"transform": scaled(k)},
    "bound method": lambda k: {"transform": Scaling(k).apply},
    "partial": lambda k: {"transform": functools.partial(torch.mul, torch.tensor(k)), "load": pixels_of},
    "v1 of lambdas": lambda k: {"transform": v1.Compose([pixels, v1.Lambda(doubled_or_not(k))])},
    "v2 of lambdas": lambda k: {"transform": v2.Compose([pixels, v2.Lambda(doubled_or_not(k))])},
    "size": lambda k: {"transform": v1.Compose([v1.Resize(15 + int(k)), v1.CenterCrop(16), v1.ToTensor()])},
    "load": lambda k: {"load": lambda path: scaled(k)(Image.open(path).convert("RGB")), "transform": None},
    "activation": lambda k: net_with(nn.ReLU() if k == 1 else nn.GELU()),
    "slope": lambda k: net_with(nn.LeakyReLU(k)),
    "number of a module": lambda k: net_with(Scaled(k, as_tensor=False)),
    "tensor of a module": lambda k: net_with(Scaled(k, as_tensor=True)),
    "applied function": lambda k: {"nodes": {"fc": Feature("y", apply=doubled_or_not(k))}},
    "data set": lambda k: {"source": Numbers(k), "transform": None, "load": unchanged},
}


def unchanged(value: torch.Tensor) -> torch.Tensor:
    return value


def pixels_of(path: str) -> torch.Tensor:
    return pixels(Image.open(path).convert("RGB"))


@pytest.mark.slow
@pytest.mark.parametrize("name", PAIRS)
def test_job_that_differs_is_refused_and_the_same_one_goes_on(name: str, tmp_path: Path) -> None:
    photos, output = tmp_path / "photos", tmp_path / "features"
    make_photos(photos, 6)
    first = run(photos, output, **PAIRS[name](1.0)).tensor("y")
    assert torch.equal(run(photos, output, **PAIRS[name](1.0)).tensor("y"), first)
    with pytest.raises(featx.ExtractionError, match=r"its (transform|decoder|modules|sample|code) is"):
        run(photos, output, **PAIRS[name](2.0))


def test_other_photos_with_the_same_names_are_another_job(tmp_path: Path) -> None:
    photos, others, output = tmp_path / "photos", tmp_path / "others", tmp_path / "features"
    keys = make_photos(photos, 6)
    make_photos(others, 6)
    shutil.copy(photos / keys[1], others / keys[0])
    run(photos, output)
    with pytest.raises(featx.ExtractionError, match="its sample is"):
        run(others, output)
    shutil.move(photos, tmp_path / "moved")
    assert len(run(tmp_path / "moved", output)) == 6


def test_photo_that_is_mended_is_the_same_job(tmp_path: Path) -> None:
    photos, output = tmp_path / "photos", tmp_path / "features"
    keys = make_photos(photos, 6)
    whole = (photos / keys[0]).read_bytes()
    (photos / keys[0]).write_bytes(whole[:30])
    assert [key for key, _ in run(photos, output).errors] == [keys[0]]
    (photos / keys[0]).write_bytes(whole)
    table = run(photos, output, retry=True)
    assert not table.errors
    assert table.keys == keys


SIZE = 3


def uses_a_global() -> int:
    return SIZE


def test_fingerprints_follow_globals_and_cycles(monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprint(uses_a_global)
    assert fingerprint(uses_a_global) == before
    monkeypatch.setitem(globals(), "SIZE", 4)
    assert fingerprint(uses_a_global) != before
    cycle: list[Any] = [1]
    cycle.append(cycle)
    assert fingerprint(cycle) == fingerprint(cycle)
    assert fingerprint({1, 2, 3}) == fingerprint({3, 2, 1})
    assert len({fingerprint(each) for each in (1, 1.0, True, "1", None, [1], (1,), torch.ones(1), [[1]])}) == 9
