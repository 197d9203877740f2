"""Memory that a data set or a model writes again, and what tells one model from another one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import featx
from featx.bulk.samples.tars import find_members
from featx.fingerprint import fingerprint

ROWS = torch.rand(12, 4, generator=torch.Generator().manual_seed(0))


def extracted(model: nn.Module, source: Any, folder: Path, **options: Any) -> featx.FeatureTable:
    options = {"batch_size": 4, "workers": 0, "progress": False, **options}
    return featx.extract(model.eval(), {"output": "y"}, source, folder, **options)


class Refilled(Dataset[torch.Tensor]):
    """Returns one tensor, with the values of another sample each time."""

    def __init__(self) -> None:
        self.row = torch.empty(4)

    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.row.copy_(ROWS[index])


def test_a_data_set_may_fill_one_tensor_again(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 3)).eval()
    table = extracted(model, Refilled(), tmp_path / "out", load=lambda row: row)
    torch.testing.assert_close(torch.stack([torch.as_tensor(table[row]["y"]) for row in range(12)]), model(ROWS))


class Shifts(nn.Module):
    """Writes its input, and fails for a number that no row of its table has."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.table = nn.Linear(4, 3), nn.Embedding(10, 3)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        x.sub_(1.0)
        return self.linear(x) + self.table(ids)


class Pairs(Dataset[Any]):
    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": ROWS[index].clone(), "ids": torch.tensor(77 if index == 6 else index % 10)}


def test_a_model_may_write_its_input_where_a_sample_fails(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Shifts()
    table = extracted(model, Pairs(), tmp_path / "out", load=lambda row: row)
    assert [key for key, _ in table.errors] == ["6"]
    for row in (table[number] for number in range(len(table))):
        index = int(row["key"])
        expected = model(ROWS[index : index + 1].clone(), torch.tensor([index % 10]))[0]
        torch.testing.assert_close(torch.as_tensor(row["y"]), expected)


class Scales(nn.Module):
    """Is kept whole, and has what it scales by in a private attribute."""

    def __init__(self, scales: Any) -> None:
        super().__init__()
        self._scales, self._seen = scales, []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._seen.append(len(x))
        return x * self._scales[0]


@pytest.mark.parametrize("make", [lambda value: [value], lambda value: (value,), lambda value: torch.full((1,), value)])
def test_private_settings_of_a_module_tell_it_apart(make: Callable[[float], Any]) -> None:
    one, other, same = Scales(make(1.0)), Scales(make(2.0)), Scales(make(1.0))
    same._seen.append(3)  # what forward changes is no setting
    assert fingerprint(one) != fingerprint(other)
    assert fingerprint(one) == fingerprint(same)


def test_python_modules_in_closures_count_by_name() -> None:
    def with_module(module: Any) -> Callable[[Any], Any]:
        return lambda row: module.dumps(row)

    assert fingerprint(with_module(json)) == fingerprint(with_module(json))
    assert fingerprint(with_module(json)) != fingerprint(with_module(torch))


def test_tar_with_a_file_twice(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    with tarfile.open(tmp_path / "twice.tar", "w") as tar:
        tar.add(tmp_path / "a.txt", "a.txt")
        member = tarfile.TarInfo("a.txt")
        member.type, member.linkname = tarfile.LNKTYPE, "a.txt"
        tar.addfile(member)
    found = find_members([str(tmp_path / "twice.tar")], has_load=True)
    assert [found.item(number).read() for number in range(len(found.places))] == [b"text", b"text"]


def test_tar_with_holes_is_refused(tmp_path: Path) -> None:
    with open(tmp_path / "holes", "wb") as file:
        file.truncate(1 << 22)
        file.seek(1 << 21)
        file.write(b"x" * 4096)
    if subprocess.run(["tar", "--sparse", "-cf", "holes.tar", "holes"], cwd=tmp_path, check=False).returncode:
        pytest.skip("this tar knows no holes")
    with pytest.raises(featx.ExtractionError, match="has holes in 'holes'; make it anew, without --sparse"):
        find_members([str(tmp_path / "holes.tar")], has_load=True)


class Given(Dataset[torch.Tensor]):
    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index]


def test_other_data_is_refused_where_the_transform_draws(tmp_path: Path) -> None:
    def noisy(row: torch.Tensor) -> torch.Tensor:
        return row + torch.rand(4)

    model = nn.Sequential(nn.Linear(4, 3)).eval()
    extracted(model, Given(ROWS), tmp_path / "out", load=noisy)
    assert len(extracted(model, Given(ROWS), tmp_path / "out", load=noisy)) == 12
    with pytest.raises(featx.ExtractionError, match="has the features of another job: its sample"):
        extracted(model, Given(ROWS * 3), tmp_path / "out", load=noisy)


class Centered(nn.Module):
    """Has a plain tensor, which is no part of its state, and passes a function on."""

    def __init__(self, mean: float, function: Callable[[torch.Tensor], torch.Tensor] = torch.relu) -> None:
        super().__init__()
        self.mean, self.function, self.inner = torch.full((4,), mean), function, Applies()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x - self.mean, self.function)


class Applies(nn.Module):
    def forward(self, x: torch.Tensor, function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return function(x) * 2


class Pads(nn.Module):
    """Goes another way where it finds padding, which the first sample has none of."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale if bool((x == 0).any()) else x + 1


OTHERS: dict[str, tuple[nn.Module, nn.Module]] = {
    "plain tensor": (Centered(0.0), Centered(1.0)),
    "function": (Centered(0.0, lambda x: x + 1), Centered(0.0, lambda x: x - 1)),
    "another graph": (Pads(1.0), Pads(2.0)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_model_of_the_same_weights_is_refused(name: str, tmp_path: Path) -> None:
    one, other = OTHERS[name]
    options: dict[str, Any] = {"load": lambda row: row, "check_rows": False}
    extracted(one, Given(ROWS), tmp_path / "out", **options)
    extracted(one, Given(ROWS), tmp_path / "out", **options)
    with pytest.raises(featx.ExtractionError, match=r"has the features of another job: its (modules|code)"):
        extracted(other, Given(ROWS), tmp_path / "out", **options)


def test_autocast_is_a_part_of_the_job(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 3)).eval()

    def extract() -> None:
        wanted = {"output": featx.Feature("y", dtype=torch.float32)}
        featx.extract(model, wanted, Given(ROWS), tmp_path / "out", load=lambda row: row, workers=0, progress=False)

    extract()
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(featx.ExtractionError, match="features of another job"):
        extract()


_PRINTS = """
from featx.fingerprint import fingerprint
print(fingerprint(lambda row: row if row in {"RGB", "L", "CMYK", "RGBA"} else [x for x in row if x in ("a", "b")]))
"""


@pytest.mark.slow
def test_fingerprints_are_the_same_in_each_process(tmp_path: Path) -> None:
    found: set[str] = set()
    for number, seed in enumerate(("1", "2", "3")):
        script = tmp_path / "script.py"
        script.write_text("# a comment\n" * number + _PRINTS)
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        run = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=True)
        found.add(run.stdout)
    assert len(found) == 1
