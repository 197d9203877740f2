"""Features that are written to a folder in the source: its files are no samples when the job goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from torch import nn

import featx
from featx.bulk.samples.sources import find_source


def _array(file: Any) -> torch.Tensor:
    return torch.from_numpy(np.load(file))


@pytest.mark.parametrize("source", ["{}", "{}/", "{}/**/*", "link", "memory://arrays"])
def test_files_of_the_job_are_no_samples(source: str, tmp_path: Path) -> None:
    values = torch.rand(5, 4)
    folder = tmp_path / "arrays"
    (folder / "features of others").mkdir(parents=True)
    names = [f"{number}.npy" for number in range(4)] + ["features of others/4.npy"]
    for name, value in zip(names, values, strict=True):
        np.save(folder / name, value.numpy())
    (tmp_path / "link").symlink_to(folder)
    output: Any = folder / "features"
    place = str(tmp_path / "link") if source == "link" else source.format(folder)
    if source.startswith("memory"):
        output, memory = f"{source}/features", fsspec.filesystem("memory")
        memory.store.clear()
        for name in names:
            memory.put_file(str(folder / name), f"/arrays/{name}")
    model = nn.Sequential(nn.Linear(4, 3)).eval()
    for _ in range(2):
        table = featx.extract(model, {"0": "y"}, place, output, load=_array, workers=0, progress=False)
        with torch.no_grad():
            torch.testing.assert_close(table.tensor("y"), model(values))
        assert [Path(key).name for key in table.keys] == [Path(name).name for name in names]


def test_features_in_another_place_are_samples_as_before(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    for name in ("a/1.npy", "a/b/2.npy"):
        np.save(tmp_path / name, np.zeros(4))
    for output in (None, str(tmp_path), str(tmp_path / "a"), str(tmp_path / "a" / "c"), "memory://a/b"):
        assert find_source(tmp_path / "a", has_load=True, output=output).keys == ["1.npy", "b/2.npy"]
    assert find_source(tmp_path / "a", has_load=True, output=str(tmp_path / "a" / "b")).keys == ["1.npy"]
