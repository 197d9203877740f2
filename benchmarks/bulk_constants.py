"""Measure what a plan for very many samples needs, and write docs/bulk-constants.md.

python benchmarks/bulk_constants.py
"""

from __future__ import annotations

import tempfile
import time
import tracemalloc
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from featx.bulk.jobs.job import hash_of_keys, hash_of_weights, read_keys, write_keys
from featx.bulk.storage.folder import LocalFolder
from featx.bulk.storage.formats import Column, open_writer, read_footer, read_table

_REPOSITORY = Path(__file__).resolve().parents[1]
_KEYS, _SHARDS = 1_000_000, 500
_ABOUT = """\
# Constants of bulk extraction

Written by `benchmarks/bulk_constants.py`; do not edit. Made with featx {featx}, torch {torch}, on one core. Medians of
three runs. Files were written to a local disk and are in the cache of the system when they are read.

| what | measured |
| --- | --- |
{table}
"""


def main() -> None:
    """Run the measurements, and write their page."""
    torch.set_num_threads(1)
    rows: list[tuple[str, str]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = LocalFolder(name)
        keys = [f"train/{number % 1000:04d}/{number:012d}.jpg" for number in range(_KEYS)]
        rows.append((f"hash of {_KEYS:,} keys of {len(keys[0])} characters", f"{_seconds(hash_of_keys, keys):.2f} s"))
        rows.append(("write these keys", f"{_seconds(write_keys, folder, keys):.2f} s"))
        size = (Path(name) / "_keys.parquet").stat().st_size
        rows.append(("the file of these keys", f"{size / 1e6:.1f} MB"))
        rows.append(("read these keys", f"{_seconds(read_keys, folder):.2f} s"))
        rows.append(("memory of these keys", f"{_memory(lambda: read_keys(folder)) / 1e6:.0f} MB"))
        net = nn.Linear(8192, 8192)
        seconds = _seconds(hash_of_weights, net)
        rows.append(("hash of weights", f"{8192 * 8192 * 4 / 1e9 / seconds:.2f} GB/s"))
        for label, kind, column, count in (
            ("vectors of 512 numbers in half precision, Parquet", "parquet", _column(512), 10_000),
            ("maps of 256 x 14 x 14 in half precision, Arrow", "arrow", _column(256, 14, 14), 500),
        ):
            path = Path(name) / f"one.{kind}"
            values = torch.rand(count, *column.shape).half()
            written = _seconds(_write, path, kind, column, values)
            read = _seconds(lambda path=path, kind=kind: read_table(str(path), kind).column(1).combine_chunks())
            megabytes = count * column.bytes / 1e6
            share = path.stat().st_size / 1e6 / megabytes
            rows.append(
                (f"write {label}", f"{megabytes / written:.0f} MB/s, {share:.3f} times the bytes of the values")
            )
            rows.append((f"read {label}", f"{megabytes / read:.0f} MB/s"))
        paths = [Path(name) / f"shard-{number}.parquet" for number in range(_SHARDS)]
        for path in paths:
            _write(path, "parquet", _column(512), torch.rand(64, 512).half())
        seconds = _seconds(lambda: [read_footer(str(path), "parquet") for path in paths])
        rows.append(("look at finished shards when a job goes on", f"{_SHARDS / seconds:.0f} a second"))
    table = "\n".join(f"| {what} | {found} |" for what, found in rows)
    text = _ABOUT.format(featx=version("featx"), torch=torch.__version__, table=table)
    (_REPOSITORY / "docs" / "bulk-constants.md").write_text(text)
    print(text)


def _column(*shape: int) -> Column:
    return Column("feature", shape, torch.float16)


def _write(path: Path, kind: Any, column: Column, values: torch.Tensor) -> None:
    writer = open_writer(path, kind, [column], {"job": "", "shard": 0})
    writer.add([f"{number:012d}.jpg" for number in range(len(values))], {"feature": values})
    writer.finish([])


def _seconds(function: Callable[..., Any], *args: Any) -> float:
    times: list[float] = []
    for _ in range(3):
        start = time.perf_counter()
        function(*args)
        times.append(time.perf_counter() - start)
    return sorted(times)[1]


def _memory(function: Callable[[], Any]) -> int:
    tracemalloc.start()
    kept = function()
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    del kept
    return size


if __name__ == "__main__":
    main()
