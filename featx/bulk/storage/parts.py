"""Read rows by their number: shards are read in parts, of which those that were used last are kept."""

from __future__ import annotations

import bisect
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, BinaryIO

from featx.bulk.extras import require
from featx.bulk.storage.formats import KEY, Column, Format, reading, tensor_of

# So many bytes of decoded values, open files and parts are kept by one process.
_MOST_BYTES, _MOST_FILES, _MOST_PARTS = 512_000_000, 128, 10_000


class Parts:
    """The parts of a shard: row groups of Parquet, which are decoded, or batches of an Arrow file, which are mapped.

    Args:
        file: its path, or an open file.
        kind: its format.
        columns: what each row has.

    Raises:
        ExtractionError: bytes of the file have changed.
    """

    def __init__(self, file: str | BinaryIO, kind: Format, columns: Sequence[Column]) -> None:
        self._columns = columns
        self._file = file
        arrow = require("pyarrow", "pyarrow reads features")
        with reading(file):
            if kind == "parquet":
                parquet = require("pyarrow.parquet", "pyarrow reads features")
                opened = parquet.ParquetFile(file, page_checksum_verification=True)
                groups = [opened.metadata.row_group(number) for number in range(opened.metadata.num_row_groups)]
                self._read: Callable[[int], Any] = opened.read_row_group
                counts = [group.num_rows for group in groups]
            else:
                source = arrow.memory_map(file) if isinstance(file, str) else arrow.PythonFile(file, mode="r")
                batches = arrow.ipc.open_file(source)
                self._read = batches.get_batch
                counts = [self._read(number).num_rows for number in range(batches.num_record_batches)]
        self.is_mapped = kind == "arrow"
        # After which row each part ends.
        self.ends = list(accumulate(counts))

    def read(self, number: int) -> Part:
        """Return a part.

        Raises:
            ExtractionError: bytes of the file have changed.
        """
        with reading(self._file):
            rows = self._read(number)
            if self.is_mapped:
                rows.validate(full=True)  # pyarrow reads past the end of the file otherwise
        return Part(rows, self._columns, is_mapped=self.is_mapped)


class Part:
    """Rows that are read together. The values of an Arrow file stay on disk until they are used."""

    def __init__(self, rows: Any, columns: Sequence[Column], *, is_mapped: bool) -> None:
        self._columns = columns
        self._rows: Any = rows if is_mapped else None
        self._keys: list[str] = [] if is_mapped else rows.column(KEY).to_pylist()
        self._values = {} if is_mapped else {each.name: tensor_of(rows.column(each.name), each) for each in columns}

    @property
    def bytes(self) -> int:
        """How much memory the values take."""
        return sum(value.nbytes for value in self._values.values())

    def row(self, number: int) -> dict[str, Any]:
        """Return the key of a row, and a tensor of its own for each feature."""
        if self._rows is None:
            return {KEY: self._keys[number], **{name: value[number].clone() for name, value in self._values.items()}}
        row = self._rows.slice(number, 1)
        found: dict[str, Any] = {KEY: row.column(KEY)[0].as_py()}
        found.update({each.name: tensor_of(row.column(each.name), each)[0] for each in self._columns})
        return found


class RowReader:
    """Returns rows of shards by their number. Several threads may ask; a copy for another process starts anew.

    Args:
        open_shard: opens a shard by its number.
    """

    def __init__(self, open_shard: Callable[[int], Parts]) -> None:
        self._open_shard = open_shard
        self._forget()

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._shards: OrderedDict[int, Parts] = OrderedDict()
        self._parts: OrderedDict[tuple[int, int], Part] = OrderedDict()
        self._bytes = 0

    def row(self, shard: int, number: int) -> dict[str, Any]:
        """Return a row of a shard."""
        with self._lock:
            parts = self._opened(shard)
            place = bisect.bisect_right(parts.ends, number)
            part = self._part((shard, place), parts)
        return part.row(number - (parts.ends[place - 1] if place else 0))

    def _opened(self, shard: int) -> Parts:
        if shard not in self._shards:
            self._shards[shard] = self._open_shard(shard)
        self._shards.move_to_end(shard)
        if len(self._shards) > _MOST_FILES:
            self._shards.popitem(last=False)
        return self._shards[shard]

    def _part(self, key: tuple[int, int], parts: Parts) -> Part:
        if key not in self._parts:
            self._parts[key] = parts.read(key[1])
            self._bytes += self._parts[key].bytes
        self._parts.move_to_end(key)
        while len(self._parts) > 1 and (self._bytes > _MOST_BYTES or len(self._parts) > _MOST_PARTS):
            self._bytes -= self._parts.popitem(last=False)[1].bytes
        return self._parts[key]

    def __getstate__(self) -> dict[str, Any]:
        return {"_open_shard": self._open_shard}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()
