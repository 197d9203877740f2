"""Features within a tolerance: what is done is in the job file, and is done again when a job goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import featx
from featx.bulk.jobs.compute import Runner
from featx.errors import ExtractionError
from featx.optimization import search
from featx.optimization.recipe import Recipe


class Samples(torch.utils.data.Dataset[torch.Tensor]):
    """Images of noise."""

    def __len__(self) -> int:
        return 21

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(3, 16, 16, generator=torch.Generator().manual_seed(index))


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3)).eval()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Compile nothing, and let each recipe take less time than the one before; return what is looked for."""
    ratios = iter(range(10**6, 0, -1))
    searched: list[Any] = []
    monkeypatch.setattr(search, "_SECONDS_TO_COMPILE", 1e9)
    monkeypatch.setattr(
        search, "time_in_turn", lambda functions, *more: [1.0, *[next(ratios) / 1e7 for _ in functions[1:]]]
    )
    monkeypatch.setattr(search, "time_once", lambda *more: 1.0)
    run = search.Search.run
    monkeypatch.setattr(search.Search, "run", lambda self: (searched.append(self), run(self))[1])
    return searched


def extract(model: nn.Module, folder: Path, **options: Any) -> featx.FeatureTable:
    options = {"batch_size": 4, "rows_per_shard": 10, "workers": 0, "progress": False, **options}
    return featx.extract(model, {"3": featx.Feature("map", pool="avg")}, Samples(), folder, load=lambda x: x, **options)


@pytest.mark.slow
def test_what_was_done_is_in_the_job_file(model: nn.Module, tmp_path: Path) -> None:
    table = extract(model, tmp_path / "fast", tolerance=2e-2)
    exact = extract(model, tmp_path / "exact")
    plan = table.job.recorded["optimization"]
    assert Recipe.from_json(plan["recipe"]).dtype == "float16"
    assert 0 < plan["chosen"]["errors"]["map"] <= 2e-2
    assert plan["inputs"][:2] == ["the example", "noise"]
    assert table.job.identity["tolerance"] == 2e-2
    assert "tolerance" not in exact.job.identity
    assert "optimization" not in exact.job.recorded
    assert list(table.keys) == list(exact.keys)
    for index in range(21):
        found, expected = (torch.as_tensor(each[index]["map"]) for each in (table, exact))
        assert found.dtype == expected.dtype == torch.float32
        assert 0 < (found - expected).norm() / expected.norm() < 2e-2


@pytest.mark.slow
def test_a_job_that_goes_on_looks_for_nothing(model: nn.Module, tmp_path: Path, quick: list[Any]) -> None:
    table = extract(model, tmp_path, tolerance=2e-2)
    assert len(quick) == 1
    shard = sorted(path for path in tmp_path.iterdir() if not path.name.startswith("_"))[1]
    before = shard.read_bytes()
    shard.unlink()
    again = extract(model, tmp_path, tolerance=2e-2)
    assert len(quick) == 1
    assert shard.read_bytes() == before
    assert again.job == table.job


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), [(2e-2, None), (None, 2e-2), (2e-2, 1e-3)])
def test_another_tolerance_is_another_job(
    first: float | None, second: float | None, model: nn.Module, tmp_path: Path
) -> None:
    extract(model, tmp_path, tolerance=first)
    with pytest.raises(ExtractionError, match="features of another job"):
        extract(model, tmp_path, tolerance=second)


class Coordinates(torch.utils.data.Dataset[torch.Tensor]):
    """Places in a picture: the first one is (0, 0), which any format holds as it is; a later one may be missing."""

    def __init__(self, missing: int | None = None) -> None:
        self.missing = missing

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.missing:
            raise OSError("the host is down")
        return torch.tensor([index, index % 7]) * 50.0


class Waves(nn.Module):
    """Takes sines of places, which are off by much where these are off by little; it refuses one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._assert((x[:, 0] != 250).all(), "not there")
        return self.b(torch.sin(self.a(x)))


@pytest.mark.slow
@pytest.mark.parametrize("missing", [None, 20])
@pytest.mark.parametrize(("batch_size", "workers"), [(2, 0), (16, 1)])
def test_errors_are_those_of_samples_all_over_the_source(
    batch_size: int, workers: int, missing: int | None, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    waves, source = Waves().eval(), Coordinates(missing)
    table = featx.extract(
        waves, {"b": "wave"}, source, tmp_path, load=lambda x: x, tolerance=1e-2, batch_size=batch_size,
        workers=workers, progress=False,
    )  # fmt: skip
    assert [int(key) for key, _ in table.errors] == sorted({5, missing or 5})
    values = torch.stack([source[int(key)] for key in table.keys])
    with torch.no_grad():
        expected = waves(values)
    error = ((table.tensor("wave") - expected).norm(dim=1) / expected.norm(dim=1)).max()
    assert error <= 1e-2


def test_smaller_batches_are_filled_up_for_compiled_code() -> None:
    sizes: list[int] = []

    class Counts(nn.Module):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            sizes.append(len(x))
            return {"a": x * 2}

    runner = Runner(Counts(), lambda x: x, torch.device("cpu"))
    runner._filled_to = 4
    for count in (1, 3, 4):
        x = torch.randn(count, 2)
        assert torch.equal(runner.features(x)["a"], x * 2)
    assert sizes == [4, 4, 4]
