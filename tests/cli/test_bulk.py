"""featx extract, verify, errors and retry."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image

import featx

from .test_commands import done, failed, run

RESNET = [
    "torchvision:resnet18",
    "--batch",
    2,
    "--seed",
    0,
    "--nodes",
    "layer3",
    "--pool",
    "avg",
    "--workers",
    0,
    "--quiet",
]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    (folder / "more").mkdir(parents=True)
    for number in range(5):
        values = np.random.default_rng(number).integers(0, 256, (240 + number, 300, 3), dtype=np.uint8)
        Image.fromarray(values).save(folder / (f"more/{number}.jpg" if number % 2 else f"{number}.jpg"))
    (folder / "bad.jpg").write_text("no image")
    return folder


def by_hand(photos: Path, keys: list[str]) -> torch.Tensor:
    torch.manual_seed(0)
    model = torchvision.models.resnet18(weights=None).eval()
    transform = torchvision.models.ResNet18_Weights.DEFAULT.transforms()
    layers = torch.nn.Sequential(*list(model.children())[:7])
    with torch.no_grad():
        images = torch.stack([transform(Image.open(photos / key)) for key in keys])
        return layers(images).mean((2, 3))


@pytest.mark.slow
def test_features_of_a_folder(photos: Path, tmp_path: Path) -> None:
    text = done("extract", *RESNET, photos, tmp_path / "out", "--dtype", "float32")
    assert "5 rows of layer3 256" in text
    table = featx.open_features(tmp_path / "out")
    assert table.keys == ["0.jpg", "2.jpg", "4.jpg", "more/1.jpg", "more/3.jpg"]
    assert torch.allclose(table.tensor("layer3"), by_hand(photos, table.keys), atol=1e-6)
    assert "each key is in exactly one" in done("verify", tmp_path / "out")
    assert done("errors", tmp_path / "out").startswith("bad.jpg\tUnidentifiedImageError")
    found = json.loads(done("errors", tmp_path / "out", "--json"))
    assert [each["key"] for each in found] == ["bad.jpg"]


@pytest.mark.slow
def test_what_has_failed_is_tried_again_from_another_folder(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done("extract", *RESNET, "photos", "out")
    (photos / "bad.jpg").write_bytes((photos / "0.jpg").read_bytes())
    monkeypatch.chdir(photos)
    assert "6 rows" in done("retry", tmp_path / "out", "--quiet")
    table = featx.open_features(tmp_path / "out")
    assert torch.equal(table.get("bad.jpg")["layer3"], table.get("0.jpg")["layer3"])
    assert done("errors", tmp_path / "out") == ""
    assert json.loads(done("verify", tmp_path / "out", "--json"))["rows"] == 6


@pytest.mark.parametrize("source", ["photos", "file://photos"])
def test_a_model_of_ones_own_is_found_from_another_folder(
    source: str, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "net_of_mine.py").write_text(
        "from torch import nn\n\ndef make():\n    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())\n"
    )
    monkeypatch.chdir(tmp_path)
    options = ["--nodes", "1", "--pool", "avg", "--size", 32, "--workers", 0, "--batch", 2, "--quiet"]
    done("extract", "net_of_mine:make", *options, source, "out")
    (photos / "bad.jpg").write_bytes((photos / "0.jpg").read_bytes())
    monkeypatch.chdir(photos)
    monkeypatch.delitem(sys.modules, "net_of_mine")
    assert "6 rows" in done("retry", "../out", "--quiet")
    assert Path.cwd() == photos


@pytest.mark.slow
def test_a_lost_file_is_found_and_done_again(photos: Path, tmp_path: Path) -> None:
    done("extract", *RESNET, photos, tmp_path / "out", "--rows", 2)
    (tmp_path / "out" / "part-000001-of-000003.parquet").unlink()
    result = run("verify", tmp_path / "out")
    assert result.exit_code == 1
    assert "part-000001-of-000003.parquet is missing; run the job again" in result.stdout
    done("extract", *RESNET, photos, tmp_path / "out", "--rows", 2)
    assert run("verify", tmp_path / "out").exit_code == 0


@pytest.mark.slow
def test_ranks_and_two_processes(photos: Path, tmp_path: Path) -> None:
    for rank in range(2):
        done("extract", *RESNET, photos, tmp_path / "ranks", "--rows", 2, "--rank", rank, "--world", 2)
    assert run("verify", tmp_path / "ranks").exit_code == 0


@pytest.mark.slow
def test_timms_transform_and_two_devices(photos: Path, tmp_path: Path) -> None:
    command = ["extract", "timm:vit_tiny_patch16_224", "--nodes", "blocks.[23]=b*", "--pool", "cls", str(photos)]
    options = ["--dtype", "float16", "--rows", "3", "--workers", "0", "--device", "cpu,cpu", "--batch", "1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, "-m", "featx", *command, str(tmp_path / "out"), *options],
        capture_output=True, text=True, check=True, env=environment,
    )  # fmt: skip
    assert "timm's: Compose" in result.stderr
    table = featx.open_features(tmp_path / "out")
    assert [(column.name, column.shape, column.dtype) for column in table.columns] == [
        ("b2", (192,), torch.float16),
        ("b3", (192,), torch.float16),
    ]
    assert featx.verify(tmp_path / "out").is_complete


def test_the_source_is_looked_for_before_a_model_is_made(tmp_path: Path) -> None:
    message = failed("extract", "no_such:model", "--nodes", "fc", tmp_path / "nowhere", tmp_path / "out")
    assert f"there is no '{tmp_path / 'nowhere'}'; give a folder of images" in " ".join(message.split())
    result = run("extract", "no_such:model", "--nodes", "fc", tmp_path, tmp_path / "out")
    assert "there is no Python module" in result.stderr


@pytest.mark.slow
def test_a_pattern_of_photos(photos: Path, tmp_path: Path) -> None:
    done("extract", *RESNET, f"{photos}/*.jpg", tmp_path / "out")
    expected = sorted(each.name for each in photos.glob("?.jpg"))
    assert featx.open_features(tmp_path / "out").keys == expected == ["0.jpg", "2.jpg", "4.jpg"]


@pytest.mark.slow
def test_mistakes(photos: Path, tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    assert "there is nothing to extract in the folder" in failed("extract", *RESNET, tmp_path / "none", tmp_path / "o")
    assert "there is no" in failed("extract", *RESNET, tmp_path / "nowhere", tmp_path / "o")
    for command in ("verify", "errors", "retry"):
        assert "has no features" in failed(command, tmp_path / "none")
    done("extract", *RESNET, photos, tmp_path / "out")
    message = failed("extract", *RESNET, "--nodes", "layer4", photos, tmp_path / "out")
    assert "has the features of another job: its nodes" in message
    assert "its weights" in failed("extract", *RESNET, "--seed", 1, photos, tmp_path / "out")
    featx.extract(
        torch.nn.Flatten(), ["output"], [photos / "0.jpg"], tmp_path / "own", workers=0, progress=False,
        transform=lambda image: torch.zeros(3),
    )  # fmt: skip
    assert "was not made by `featx extract`" in failed("retry", tmp_path / "own")


@pytest.mark.slow
def test_features_that_depend_on_other_samples_are_written_if_asked_for(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("centered.py").write_text(
        "import torch\n\nclass Centered(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.pool = torch.nn.AdaptiveAvgPool2d(1)\n\n    def forward(self, x):\n"
        "        y = self.pool(x).flatten(1)\n        return y - y.mean(0)\n"
    )
    arguments = ["extract", "centered:Centered", "--size", 32, "--nodes", "output", "--workers", 0, "--quiet", photos]
    assert "--any-rows" in failed(*arguments, tmp_path / "out")
    done(*arguments, tmp_path / "any", "--any-rows")
    assert len(featx.open_features(tmp_path / "any")) == 5
