"""Rows by their number, in any order, from shards that are read in parts."""

from __future__ import annotations

import pickle
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import featx
from featx.bulk.storage import formats, parts


class Map(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).reshape(-1, 3, 4)


@pytest.fixture(params=["parquet", "arrow"])
def table(request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> featx.FeatureTable:
    """70 rows in three shards, of parts of 8 rows."""
    monkeypatch.setattr(formats, "_ROWS_OF_PARQUET", 8)
    monkeypatch.setattr(formats, "_ROWS_OF_ARROW", 8)
    torch.manual_seed(0)
    return featx.extract(
        Map().eval(), {"linear": "vector", "output": "map"}, torch.randn(70, 4), tmp_path / "features",
        transform=nn.Identity(), workers=0, batch_size=5, rows_per_shard=30, format=request.param, progress=False,
    )  # fmt: skip


def check(table: featx.FeatureTable, numbers: list[int]) -> None:
    vectors, maps = table.tensor("vector"), table.tensor("map")
    for number in numbers:
        row = table[number]
        assert row["key"] == str(number % 70)
        assert torch.equal(row["vector"], vectors[number])
        assert torch.equal(row["map"], maps[number])


def test_rows_come_in_any_order(table: featx.FeatureTable) -> None:
    numbers = [*range(70), -1, -70]
    random.Random(0).shuffle(numbers)
    check(table, numbers)
    with pytest.raises(IndexError):
        table[70]


def test_little_is_kept(table: featx.FeatureTable, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_MOST_BYTES", "_MOST_FILES", "_MOST_PARTS"):
        monkeypatch.setattr(parts, name, 1)
    check(table, [5, 65, 6, 31, 5, 66])
    assert len(table._rows._parts) == len(table._rows._shards) == 1


def test_a_part_is_read_once(table: featx.FeatureTable, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    original = parts.Parts.read
    monkeypatch.setattr(parts.Parts, "read", lambda self, number: read.append(number) or original(self, number))
    numbers = [*range(70)] * 2
    random.Random(0).shuffle(numbers)
    check(table, numbers)
    assert sorted(read) == sorted([0, 1, 2, 3] * 2 + [0, 1])  # of 30, 30 and 10 rows


def test_a_row_may_be_written(table: featx.FeatureTable) -> None:
    before = table[3]["vector"].clone()
    table[3]["vector"].zero_()
    assert torch.equal(table[3]["vector"], before)


@pytest.mark.slow
def test_threads_and_processes_read_one_table(table: featx.FeatureTable) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda seed: check(table, random.Random(seed).sample(range(70), 30)), range(4)))
    check(pickle.loads(pickle.dumps(table)), [1, 69])
    loader = DataLoader(table, batch_size=16, shuffle=True, num_workers=2)
    assert sorted(key for batch in loader for key in batch["key"]) == sorted(map(str, range(70)))


def test_damaged_bytes_are_an_error(table: featx.FeatureTable) -> None:
    file = Path(table.paths[0])
    data = bytearray(file.read_bytes())
    data[data.index(table.tensor("vector")[0].numpy().tobytes())] ^= 1
    file.write_bytes(data)
    if table.job.format == "parquet":
        with pytest.raises(featx.ExtractionError, match=r"cannot be read: .*; remove that file"):
            table[0]
    # A row of an Arrow file is read without its checksum, which is that of all rows.
    assert not featx.verify(file.parent).is_complete


@pytest.mark.slow
@pytest.mark.parametrize(
    ("numbers", "count", "groups"),
    [
        (16, 2500, [1000, 1000, 500]),
        (16_384, 1100, [1000, 100]),  # the largest vectors that are Parquet by themselves
        (1_000_000, 40, [16, 16, 8]),
        (20_000_000, 3, [1, 1, 1]),
    ],
)
def test_row_groups_of_parquet_are_bounded_in_bytes_where_rows_are_large(
    numbers: int, count: int, groups: list[int], tmp_path: Path
) -> None:
    writer = formats.open_writer(
        tmp_path / "part", "parquet", [formats.Column("map", (numbers,), torch.float32)], {"shard": 0}
    )
    for start in range(0, count, 10):
        keys = [str(number) for number in range(start, min(start + 10, count))]
        writer.add(keys, {"map": torch.arange(start, start + len(keys)).float()[:, None].expand(-1, numbers)})
    assert writer.finish([]) == count
    file = pq.ParquetFile(tmp_path / "part")
    assert [file.metadata.row_group(each).num_rows for each in range(file.num_row_groups)] == groups
    assert file.read(["key"]).column("key").to_pylist() == [str(number) for number in range(count)]
