"""extract on a GPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image

import featx


def transform(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image, dtype=np.float32)).permute(2, 0, 1) / 255


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    draw = np.random.default_rng(0)
    folder = tmp_path / "photos"
    folder.mkdir()
    for number in range(70):
        Image.fromarray(draw.integers(0, 255, (48, 48, 3), dtype=np.uint8)).save(folder / f"{number:03d}.png")
    return folder


@pytest.fixture
def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torchvision.models.resnet18(weights=None).eval()


@pytest.mark.parametrize("device", ["cuda", ["cuda:0"], "where the model is"])
def test_rows_are_those_of_the_cpu(photos: Path, model: torch.nn.Module, tmp_path: Path, device: str) -> None:
    request = {"layer3": featx.Feature("C4", pool="avg")}
    options = {"transform": transform, "workers": 2, "progress": False}
    featx.extract(model, request, photos, tmp_path / "cpu", **options)
    if device == "where the model is":
        featx.extract(model.to("cuda"), request, photos, tmp_path / "gpu", **options)
    else:
        featx.extract(model, request, photos, tmp_path / "gpu", device=device, **options)
        assert {weight.device.type for weight in model.parameters()} == {"cpu"}
    one, other = (featx.open_features(tmp_path / name) for name in ("cpu", "gpu"))
    assert list(one.keys) == list(other.keys)
    assert len(one) == 70
    found = [np.stack([table[index]["C4"] for index in range(70)]) for table in (one, other)]
    assert np.abs(found[0] - found[1]).max() / np.abs(found[0]).max() < 1e-2  # TF32 in convolutions
    assert not np.array_equal(*found)


def large(image: Image.Image) -> torch.Tensor:
    return torch.nn.functional.interpolate(transform(image)[None], size=(512, 512))[0]


def test_the_batch_size_stays_within_the_memory_of_the_gpu(
    photos: Path, model: torch.nn.Module, tmp_path: Path
) -> None:
    """64 images take 1 GiB in the first layer alone; the process may have 2 GiB."""
    request = {"layer1": featx.Feature("C2", pool="avg")}
    options = {"transform": large, "device": "cuda", "workers": 0, "progress": False}
    torch.cuda.empty_cache()
    _, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction((2 << 30) / total)
    try:
        featx.extract(model, request, photos, tmp_path / "out", **options)
        assert len(featx.open_features(tmp_path / "out")) == 70
        with pytest.raises(featx.ExtractionError, match="64 samples at once do not fit into the memory of cuda"):
            featx.extract(model, request, photos, tmp_path / "other", batch_size=64, **options)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
