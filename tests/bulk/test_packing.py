"""Batches with many shapes, which are sent from the processes that read in few pieces."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import featx
from featx.bulk.samples.packing import number_of_tensors, pack, unpack

VALUES: Any = {
    "groups": [([0, 2], {"ids": torch.arange(6).view(2, 3), "mask": torch.ones(2, 3, dtype=torch.bool)})],
    "empty": torch.zeros(0, 4),
    "scalar": torch.tensor(2.5),
    "text": "x",
}


def test_values_are_packed_by_dtype_and_unpacked() -> None:
    packed = pack(VALUES)
    assert set(packed.tensors) == {torch.int64, torch.bool, torch.float32}
    found = unpack(packed)
    assert found["text"] == "x"
    assert found["groups"][0][0] == [0, 2]
    pairs = [(found[key], VALUES[key]) for key in ("empty", "scalar")]
    pairs += [(found["groups"][0][1][key], VALUES["groups"][0][1][key]) for key in ("ids", "mask")]
    for one, other in pairs:
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert torch.equal(one, other)
    assert number_of_tensors(VALUES) == 4


class SumOfTexts(nn.Module):
    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return (ids * mask).sum(1, keepdim=True).float()


def text(number: Any) -> dict[str, torch.Tensor]:
    length = 1 + int(number) % 90
    return {"ids": torch.full((length,), int(number)), "mask": torch.ones(length, dtype=torch.long)}


@pytest.fixture
def few_files() -> Iterator[None]:
    """Let this process open few files."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.slow
def test_batches_of_many_shapes_need_few_open_files(tmp_path: Path, few_files: None) -> None:
    pytest.importorskip("pyarrow")
    table = featx.extract(
        SumOfTexts(), {"output": "sum"}, torch.arange(300), tmp_path / "out", load=text, batch_size=128, workers=1,
        timeout=20, progress=False,
    )  # fmt: skip
    found = {int(row["key"]): float(row["sum"][0]) for row in table}
    assert found == {number: float(number * (1 + number % 90)) for number in range(300)}


class Numbers:
    """Samples of which one kills the process that reads it, once."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __len__(self) -> int:
        return 300

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 7 and multiprocessing.parent_process() is not None and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.tensor([index, index])


@pytest.mark.slow
def test_a_batch_that_is_read_one_by_one_needs_few_open_files(tmp_path: Path, few_files: None) -> None:
    samples = Numbers(tmp_path / "mark")
    table = featx.extract(
        nn.Sequential(nn.Identity()).eval(), {"0": "y"}, samples, tmp_path / "out", transform=nn.Identity(),
        batch_size=250, workers=1, timeout=20, progress=False,
    )  # fmt: skip
    assert samples.mark.exists()
    assert table.tensor("y")[:, 0].tolist() == list(range(300))
