"""Job files and lists of keys that somebody has changed, or a disk has damaged."""

from __future__ import annotations

import dataclasses
import re
import tarfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import featx
from featx.errors import ExtractionError

from .conftest import make_net, make_photos, pixels


def run(folder: Path, **options: Any) -> featx.FeatureTable:
    make_photos(folder / "photos", 3)
    return featx.extract(
        make_net(), {"fc": "y"}, folder / "photos", folder / "features", transform=pixels, workers=0, progress=False,
        batch_size=4, **options,
    )  # fmt: skip


DAMAGES: dict[str, tuple[str, Callable[[bytes], bytes], str]] = {
    "empty keys": ("_keys", lambda data: b"", "_keys' cannot be read: .*; remove that file, and run the job again"),
    "cut keys": ("_keys", lambda data: data[: len(data) // 2], "_keys' cannot be read"),
    "other keys": (
        "_keys",
        lambda data: table_of_other_columns(),
        "_keys' has no column 'key'.*; remove that file, and run the job again",
    ),
    "unknown dtype": (
        "_job.json",
        lambda data: data.replace(b'"float32"', b'"flo9t32"'),
        "_job.json' is no job file .*Put back a copy",
    ),
    "fewer samples": (
        "_job.json",
        lambda data: data.replace(b'"samples": 3', b'"samples": 2'),
        "_job.json' .* says something else than was written",
    ),
    "no rows": (
        "_job.json",
        lambda data: re.sub(rb'"rows_per_shard": \d+', b'"rows_per_shard": 0', data),
        "_job.json' .* says something else than was written",
    ),
    "a number": ("_job.json", lambda data: b"3", "_job.json' is no job file"),
    "a list": ("_job.json", lambda data: b"[]", "_job.json' is no job file"),
}


def table_of_other_columns() -> bytes:
    data = BytesIO()
    pq.write_table(pa.table({"name": ["a"]}), data)
    return data.getvalue()


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_of_the_job_is_named(name: str, tmp_path: Path) -> None:
    file, damage, words = DAMAGES[name]
    run(tmp_path)
    path = next((tmp_path / "features").glob(f"{file}*"))
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ExtractionError, match=words):
        featx.verify(tmp_path / "features")


def test_folder_in_place_of_the_job_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "_job.json").mkdir()
    with pytest.raises(ExtractionError, match=r"_job\.json' is no job file .*Put back a copy"):
        featx.open_features(tmp_path)


def test_job_file_holds_what_json_changes(tmp_path: Path) -> None:
    recorded: dict[str, Any] = {"numbers": {2: (1.5, None), 10: "a"}}
    run(tmp_path, recorded=recorded)
    assert featx.open_features(tmp_path / "features").job.recorded["numbers"] == {"2": [1.5, None], "10": "a"}


def test_broken_images_in_a_tar_give_the_same_bytes_each_time(tmp_path: Path) -> None:
    make_photos(tmp_path / "photos", 2)
    with tarfile.open(tmp_path / "photos.tar", "w") as tar:
        tar.add(tmp_path / "photos", arcname="")
        broken = tarfile.TarInfo("broken.png")
        broken.size = 8
        tar.addfile(broken, BytesIO(b"no image"))
    tables = []
    for folder in ("one", "two"):
        kept = [bytearray(number) for number in range(len(tables) * 1000)]  # other addresses
        tables.append(
            featx.extract(
                make_net(), {"fc": "y"}, tmp_path / "photos.tar", tmp_path / folder, transform=pixels, workers=0,
                progress=False, batch_size=4,
            )
        )  # fmt: skip
        del kept
    (failure,) = tables[0].errors
    assert failure[1].endswith("cannot identify image file <_io.BytesIO object>")
    first, second = (Path(table.paths[0]).read_bytes() for table in tables)
    assert first == second


def test_another_shape_than_was_written_is_found(tmp_path: Path) -> None:
    job = run(tmp_path).job
    columns = tuple(dataclasses.replace(column, shape=(55,)) for column in job.columns)
    (tmp_path / "features" / "_job.json").write_bytes(dataclasses.replace(job, columns=columns).to_json())
    assert not featx.verify(tmp_path / "features").is_complete
