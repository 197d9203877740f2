"""Samples that are read when a job starts: failures that pass, and samples that take too long."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import featx
from featx.errors import ExtractionError

VALUES = torch.rand(40, 4, generator=torch.Generator().manual_seed(0))


class Unreliable(Dataset[torch.Tensor]):
    """Samples of which some cannot be read now."""

    def __init__(self, *failing: int, seconds: float = 0) -> None:
        self.failing, self.seconds = failing, seconds

    def __len__(self) -> int:
        return len(VALUES)

    def __getitem__(self, index: int) -> torch.Tensor:
        if index in self.failing:
            time.sleep(self.seconds)
            raise OSError("the host is down")
        return VALUES[index]


def run(source: Any, folder: Path, **options: Any) -> featx.FeatureTable:
    options = {"transform": nn.Identity(), "workers": 0, "progress": False, "batch_size": 8, **options}
    torch.manual_seed(0)
    return featx.extract(nn.Linear(4, 3), {"output": "y"}, source, folder / "features", **options)


@pytest.mark.parametrize("number", range(0, 40, 3))
def test_a_failure_that_passes_is_retried_whichever_sample_it_is(number: int, tmp_path: Path) -> None:
    assert [key for key, _ in run(Unreliable(number), tmp_path).errors] == [str(number)]
    table = run(Unreliable(), tmp_path, retry=True)
    assert (len(table), table.errors) == (40, [])
    whole = run(Unreliable(), tmp_path / "whole")
    # Some CPUs round otherwise for another number of rows, and the one that was retried ran alone.
    torch.testing.assert_close(table.tensor("y"), whole.tensor("y"), rtol=0, atol=1e-6)


@pytest.mark.parametrize("number", [0, 5, 39])
def test_a_sample_that_cannot_be_read_when_a_job_goes_on_is_no_other_job(number: int, tmp_path: Path) -> None:
    run(Unreliable(), tmp_path)
    assert len(run(Unreliable(number), tmp_path)) == 40  # nothing is left to do


def test_so_it_is_where_the_transform_gives_another_input_each_time(tmp_path: Path) -> None:
    def noisy(value: torch.Tensor) -> torch.Tensor:
        return value + torch.rand(4)

    run(Unreliable(), tmp_path, transform=noisy)
    assert len(run(Unreliable(0), tmp_path, transform=noisy)) == 40


def test_other_samples_are_another_job_also_where_some_cannot_be_read(tmp_path: Path) -> None:
    class Other(Unreliable):
        def __getitem__(self, index: int) -> torch.Tensor:
            return super().__getitem__(index) + (index > 0)

    run(Unreliable(5), tmp_path)
    with pytest.raises(ExtractionError, match="its sample is"):
        run(Other(10), tmp_path)


@pytest.mark.slow
def test_the_timeout_holds_when_a_job_starts(tmp_path: Path) -> None:
    """Otherwise this test takes an hour."""
    table = run(Unreliable(5, seconds=3600), tmp_path, timeout=0.5, workers=1)
    assert table.errors == [("5", "TimeoutError: reading it took more than 0.5 s")]


def test_samples_that_hang_are_told(tmp_path: Path) -> None:
    with pytest.raises(ExtractionError, match=r"TimeoutError: reading it took more than 0\.1 s"):
        run(Unreliable(*range(40), seconds=3600), tmp_path, timeout=0.1)


def test_a_sample_that_ends_the_process_is_a_failure(tmp_path: Path) -> None:
    class Exits(Unreliable):
        def __getitem__(self, index: int) -> torch.Tensor:
            if index == 0:
                raise SystemExit
            return super().__getitem__(index)

    table = run(Exits(), tmp_path)
    assert [key for key, _ in table.errors] == ["0"]
    assert "SystemExit" in table.errors[0][1]


def test_one_number_for_each_sample(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 1), nn.Flatten(0))
    table = featx.extract(
        model, {"output": "score"}, VALUES, tmp_path / "features", transform=nn.Identity(), workers=0, progress=False
    )
    assert torch.allclose(table.tensor("score"), model(VALUES))


def test_a_table_knows_its_keys(tmp_path: Path) -> None:
    table = run(Unreliable(3), tmp_path)
    assert "2" in table
    assert 2 in table
    assert "3" not in table
    assert None not in table


class Refuses(nn.Module):
    """Raises for inputs that begin with a negative number."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._assert((x[:, 0] >= 0).all(), "negative")
        return self.layer(x)


def refused(*numbers: int) -> list[torch.Tensor]:
    """Samples of which the model refuses some."""
    return [value - 2.0 * (number in numbers) for number, value in enumerate(VALUES)]


@pytest.mark.slow
@pytest.mark.parametrize("is_extractor", [True, False])
@pytest.mark.parametrize("numbers", [(0,), (0, 1, 2, 17), (5,)])
def test_a_sample_for_which_the_model_raises_is_a_failure_also_in_the_first_place(
    numbers: tuple[int, ...], is_extractor: bool, tmp_path: Path
) -> None:
    model = Refuses().eval()
    extractor = featx.create_feature_extractor(model, {"layer": "y"}, example_inputs=VALUES)
    given, nodes = (extractor, None) if is_extractor else (model, {"layer": "y"})
    first, table = (  # and when it goes on
        featx.extract(given, nodes, refused(*numbers), tmp_path, transform=nn.Identity(), workers=0, progress=False)
        for _ in range(2)
    )
    assert first.errors == table.errors
    assert [int(key) for key, _ in table.errors] == list(numbers)
    assert all("negative" in reason for _, reason in table.errors)
    rest = VALUES[[number for number in range(40) if number not in numbers]]
    with torch.no_grad():
        torch.testing.assert_close(table.tensor("y"), model(rest))


def test_of_another_size_than_the_model_takes_too(tmp_path: Path) -> None:
    convolution = nn.Sequential(nn.Conv2d(3, 4, 3)).eval()
    images = [torch.rand(3, size, size) for size in (2, 9, 9, 9)]
    table = featx.extract(
        convolution, {"0": featx.Feature("y", pool="avg")}, images, tmp_path, transform=nn.Identity(), workers=0,
        progress=False,
    )  # fmt: skip
    assert [key for key, _ in table.errors] == ["0"]
    with torch.no_grad():
        torch.testing.assert_close(table.tensor("y"), convolution(torch.stack(images[1:])).mean((2, 3)))


def test_a_model_that_raises_for_all_samples_is_told_after_some(tmp_path: Path) -> None:
    model = Refuses()
    with pytest.raises(ExtractionError, match=r"fails on the first sample: .*negative.*shape \(2, 4\)"):
        featx.extract(
            model, {"layer": "y"}, refused(*range(40)), tmp_path, transform=nn.Identity(), workers=0, progress=False
        )
    assert list(tmp_path.iterdir()) == []
