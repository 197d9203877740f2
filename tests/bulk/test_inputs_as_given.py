"""Inputs go to the model as they are given, and what a job is asked for is what it does."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pandas
import pytest
import torch
from PIL import Image
from torch import nn

import featx


def extracted(model: nn.Module, samples: Any, folder: Path, **options: Any) -> featx.FeatureTable:
    return featx.extract(
        model.eval(), {"layer": "y"}, samples, folder / "features", workers=0, progress=False, **options
    )


class Casts(nn.Module):
    """Takes off what all inputs have in common, which single precision has no room for, and casts then."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(1, 3)

    def forward(self, time: torch.Tensor) -> torch.Tensor:
        return self.layer((time - 1.7e9).float())


@pytest.mark.parametrize("way", ["load", "transform"])
def test_inputs_keep_their_dtype_where_the_model_takes_it(way: str, tmp_path: Path) -> None:
    times = [torch.tensor([1.7e9 + 10.0 * number], dtype=torch.float64) for number in range(6)]
    model = Casts().eval()
    table = extracted(model, times, tmp_path, **{way: nn.Identity()})
    with torch.no_grad():
        for number, time in enumerate(times):
            torch.testing.assert_close(torch.as_tensor(table[number]["y"]), model(time[None])[0])


class OfLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def test_inputs_are_cast_for_an_extractor_too_where_it_does_not_take_them(tmp_path: Path) -> None:
    model = OfLayer().double().eval()
    extractor = featx.create_feature_extractor(model, {"layer": "y"}, example_inputs=torch.rand(2, 4).double())
    samples = [torch.rand(4) for _ in range(3)]
    table = featx.extract(
        extractor, None, samples, tmp_path / "features", transform=nn.Identity(), workers=0, progress=False
    )
    with torch.no_grad():
        torch.testing.assert_close(torch.as_tensor(table[1]["y"]), model(samples[1].double()[None])[0])


def _length(text: str) -> torch.Tensor:
    return torch.full((4,), float(len(text)))


def test_a_folder_of_the_name_of_a_text_makes_no_path_of_it(tmp_path: Path) -> None:
    (tmp_path / "cats").mkdir()
    pandas.DataFrame({"name": ["cats", "dogs!", "birds!!"]}).to_csv(tmp_path / "names.csv", index=False)
    model = OfLayer().eval()
    table = extracted(model, str(tmp_path / "names.csv"), tmp_path, load=_length, column="name")
    assert list(table.keys) == ["0", "1", "2"]
    with torch.no_grad():
        torch.testing.assert_close(torch.as_tensor(table[1]["y"]), model(torch.full((1, 4), 5.0))[0])


def test_texts_and_paths_in_one_column_are_refused(tmp_path: Path) -> None:
    (tmp_path / "cats").write_text("a file")
    pandas.DataFrame({"name": ["cats", "dogs"]}).to_csv(tmp_path / "names.csv", index=False)
    with pytest.raises(featx.ExtractionError, match="'cats' is a file that is there, and 'dogs' is none"):
        extracted(OfLayer(), str(tmp_path / "names.csv"), tmp_path, load=_length, column="name")
    assert not (tmp_path / "features").exists()


class OfImages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).mean((2, 3))


def test_a_deviation_of_zero_is_an_error_as_in_torchvision(tmp_path: Path) -> None:
    transforms = pytest.importorskip("torchvision.transforms")
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.5,) * 3, (0.2, 0.0, 0.2))])
    with pytest.raises(featx.ExtractionError, match="std evaluated to zero"):
        extracted(OfImages(), [Image.new("RGB", (8, 8))] * 3, tmp_path, transform=transform)


@pytest.mark.parametrize("file_format", ["parquet", "arrow"])
def test_a_relative_folder_with_a_colon_is_no_url(
    file_format: Literal["parquet", "arrow"], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    samples = [torch.rand(4) for _ in range(3)]
    table = extracted(OfLayer(), samples, Path("run:1"), transform=nn.Identity(), format=file_format)
    assert len(table) == len(featx.open_features("run:1/features")) == 3


@pytest.mark.parametrize("is_there", [True, False])
def test_paths_that_are_below_the_working_directory_are_told(
    is_there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lists").mkdir()
    (tmp_path / "photos").mkdir()
    if is_there:
        Image.new("RGB", (8, 8)).save(tmp_path / "photos" / "1.png")
    (tmp_path / "lists" / "all.txt").write_text("photos/0.png\nphotos/1.png\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(featx.ExtractionError, match="can be read") as caught:
        extracted(OfLayer(), "lists/all.txt", tmp_path, transform=nn.Identity())
    hint = f"read from the folder 'lists', and 'photos/1.png' is below the working directory, '{tmp_path}'"
    assert (hint in str(caught.value)) == is_there
