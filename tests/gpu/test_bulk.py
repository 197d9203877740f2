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


def test_a_batch_that_does_not_fit_is_made_smaller(photos: Path, model: torch.nn.Module, tmp_path: Path) -> None:
    """The batch size that is found by itself stays within the memory of the GPU."""
    free, total = torch.cuda.mem_get_info()
    taken = torch.empty(free - (1 << 30), dtype=torch.uint8, device="cuda")
    try:
        large = lambda image: torch.nn.functional.interpolate(transform(image)[None], size=(512, 512))[0]  # noqa: E731
        summary = featx.extract(
            model, {"layer1": featx.Feature("C2", pool="avg")}, photos, tmp_path / "out", transform=large,
            device="cuda", workers=0, progress=False,
        )  # fmt: skip
        assert len(featx.open_features(tmp_path / "out")) == 70
        print(summary)
    finally:
        del taken
        torch.cuda.empty_cache()


def test_a_given_batch_size_that_does_not_fit(photos: Path, model: torch.nn.Module, tmp_path: Path) -> None:
    free, _ = torch.cuda.mem_get_info()
    taken = torch.empty(free - (1 << 30), dtype=torch.uint8, device="cuda")
    try:
        large = lambda image: torch.nn.functional.interpolate(transform(image)[None], size=(1024, 1024))[0]  # noqa: E731
        try:
            featx.extract(
                model, {"layer1": featx.Feature("C2", pool="avg")}, photos, tmp_path / "out", transform=large,
                device="cuda", workers=0, batch_size=64, progress=False,
            )  # fmt: skip
        except Exception as error:
            print(type(error), error)
            assert "batch" in str(error)
        else:
            table = featx.open_features(tmp_path / "out")
            assert len(table) == 70, table.errors
    finally:
        del taken
        torch.cuda.empty_cache()
