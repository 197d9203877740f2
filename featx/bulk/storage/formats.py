"""Formats of shards: Parquet for vectors, Arrow IPC for maps. Each file says itself which samples failed."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol

import torch

from featx.bulk.extras import require
from featx.bulk.storage.failpoints import reach
from featx.errors import ArgumentTypeError, ExtractionError

Format = Literal["parquet", "arrow"]
# A sample that failed: its key, and why.
Failure = tuple[str, str]
Rows = dict[str, torch.Tensor]
KEY = "key"
_FOOTER = b"featx"
_SHAPE = b"shape"
# What to do about a shard whose bytes have changed.
NEXT_STEP = "remove that file, and run the job again, which computes it again"
_TYPES = {
    torch.float16: "float16", torch.float32: "float32", torch.float64: "float64", torch.bool: "bool_",
    torch.int8: "int8", torch.int16: "int16", torch.int32: "int32", torch.int64: "int64", torch.uint8: "uint8",
}  # fmt: skip
# Rows that are written together: in Parquet at most so many of at most so many bytes, and in Arrow files. They are part
# of what the bytes of a file depend on, so that a job that goes on needs the same ones.
_ROWS_OF_PARQUET, _BYTES_OF_PARQUET, _ROWS_OF_ARROW = 1000, 64 * 2**20, 16


@dataclass(frozen=True)
class Column:
    """One feature of each sample.

    Attributes:
        name: its key in the result of the extractor.
        shape: of one sample.
        dtype: of its values.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """How many bytes the values of one sample take."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Footer:
    """What a shard says of itself.

    Attributes:
        rows: how many samples have features in it.
        failures: the samples that failed.
        about: what was given to `write_shard`.
        checksum: of the keys and values in an Arrow file. Parquet has one for each page.
    """

    rows: int
    failures: list[Failure]
    about: dict[str, Any]
    checksum: int | None = None


class ShardWriter(Protocol):
    """Writes the rows of one shard."""

    def add(self, keys: Sequence[str], rows: Mapping[str, torch.Tensor]) -> None:
        """Write rows."""
        ...

    def finish(self, failures: Sequence[Failure]) -> int:
        """Write what is left, the failures, and close the file; return how many rows are in it.

        Raises the error of an earlier write that failed.
        """
        ...

    def abandon(self) -> None:
        """Close the file, which is of no use."""
        ...


def check_columns(columns: Sequence[Column]) -> None:
    """Refuse what no format can hold.

    Raises:
        ArgumentTypeError: a dtype or a name cannot be written.
    """
    for column in columns:
        if column.dtype not in _TYPES:
            raise ArgumentTypeError(
                f"'{column.name}' is of {column.dtype}, which files of features do not have; give it another one, by "
                "Feature(dtype=torch.float16) for example"
            )
        if not column.name:
            raise ArgumentTypeError("a feature has an empty key, which is no name of a column")
        if 0 in column.shape:
            raise ArgumentTypeError(f"'{column.name}' has no elements: its shape is {column.shape} for each sample")
        if column.name == KEY:
            raise ArgumentTypeError(f"a feature cannot be called '{KEY}': that is the column of the samples' keys")


def open_writer(path: Path, kind: Format, columns: Sequence[Column], about: Mapping[str, Any]) -> ShardWriter:
    """Start to write a shard to a file. Its bytes depend on what is written alone."""
    return _Writer(path, kind, columns, about)


def read_footer(file: str | BinaryIO, kind: Format) -> Footer:
    """Return what a shard says of itself, without reading its rows.

    Args:
        file: its path, or an open file.
        kind: its format.

    Raises:
        ExtractionError: the file is truncated, or no shard.
    """
    arrow = require("pyarrow", "pyarrow reads features")
    try:
        if kind == "parquet":
            metadata = require("pyarrow.parquet", "pyarrow reads features").read_metadata(file)
            found = json.loads(metadata.metadata[_FOOTER])
        else:
            with arrow.OSFile(file) if isinstance(file, str) else arrow.PythonFile(file, mode="r") as opened:
                reader = arrow.ipc.open_file(opened)
                last = reader.get_batch_with_custom_metadata(reader.num_record_batches - 1)
                found = json.loads(last.custom_metadata[_FOOTER])
        failures = [(key, why) for key, why in found["failures"]]
        return Footer(found["rows"], failures, found["about"], found.get("checksum"))
    except (arrow.ArrowException, OSError, KeyError, TypeError, ValueError) as error:
        raise ExtractionError(f"'{file}' is no whole file of features: {error}") from error


def read_table(file: str | BinaryIO, kind: Format, columns: Sequence[str] | None = None) -> Any:
    """Return the rows of a shard as a pyarrow table; the values of Arrow files stay on disk until they are used.

    Args:
        file: its path, or an open file.
        kind: its format.
        columns: the names of the columns to read; by default all.

    Raises:
        ExtractionError: bytes of the file have changed.
    """
    arrow = require("pyarrow", "pyarrow reads features")
    with reading(file):
        if kind == "parquet":
            parquet = require("pyarrow.parquet", "pyarrow reads features")
            return parquet.ParquetFile(file, page_checksum_verification=True).read(columns)
        opened = arrow.memory_map(file) if isinstance(file, str) else arrow.PythonFile(file, mode="r")
        table = arrow.ipc.open_file(opened).read_all()
        table.validate(full=True)  # pyarrow reads past the end of the file otherwise, and the process is lost
        return table if columns is None else table.select(columns)


@contextmanager
def reading(file: str | BinaryIO, next_step: str = NEXT_STEP) -> Generator[None]:
    """Let what pyarrow raises for damaged bytes be an error that names the file and the next step.

    Raises:
        ExtractionError: the file cannot be read.
    """
    arrow = require("pyarrow", "pyarrow reads features")
    try:
        yield
    except (arrow.ArrowException, OSError, ValueError) as error:
        raise ExtractionError(f"'{file}' cannot be read: {' '.join(str(error).split())}; {next_step}") from error


def has_columns(table: Any, columns: Sequence[Column]) -> bool:
    """Say whether a table has the keys and these columns, with their shapes and dtypes."""
    expected = _schema(require("pyarrow", "pyarrow reads features"), columns)
    if not table.schema.equals(expected):
        return False
    # Parquet adds metadata of its own.
    shapes = [[(field.metadata or {}).get(_SHAPE) for field in schema] for schema in (table.schema, expected)]
    return shapes[0] == shapes[1]


def checksum_of(table: Any) -> int:
    """Return the checksum of the keys and values of a table. O(bytes)."""
    checksum = 0
    for batch in table.to_batches():
        checksum = _checksum(batch, checksum)
    return checksum


def _checksum(batch: Any, before: int) -> int:
    keys, *columns = batch.columns
    checksum = zlib.crc32("\0".join(keys.to_pylist()).encode(), before)
    for column in columns:
        flat = column.flatten() if hasattr(column, "flatten") else column
        checksum = zlib.crc32(flat.to_numpy(zero_copy_only=False).tobytes(), checksum)
    return checksum


def tensor_of(values: Any, column: Column) -> torch.Tensor:
    """Return the values of a column of a pyarrow table as a tensor of the rows."""
    array = values.combine_chunks() if hasattr(values, "combine_chunks") else values
    flat = array.flatten() if column.shape else array
    numbers = flat.to_numpy(zero_copy_only=False)
    return torch.from_numpy(numbers.copy()).to(column.dtype).reshape(len(array), *column.shape)


class _Writer:
    def __init__(self, path: Path, kind: Format, columns: Sequence[Column], about: Mapping[str, Any]) -> None:
        self._arrow = require("pyarrow", "pyarrow writes features")
        self._columns = columns
        self._about = dict(about)
        self._schema = _schema(self._arrow, columns)
        self._group = _rows_of_group(columns) if kind == "parquet" else _ROWS_OF_ARROW
        # How many rows are in the file, and the error after which no more are written.
        self._count = 0
        self._error: Exception | None = None
        self._keys: list[str] = []
        self._rows: dict[str, list[torch.Tensor]] = {column.name: [] for column in columns}
        self._file = _ParquetFile(path, self._schema) if kind == "parquet" else _ArrowFile(path, self._schema)

    def add(self, keys: Sequence[str], rows: Mapping[str, torch.Tensor]) -> None:
        self._keys += keys
        for name, held in self._rows.items():
            held.append(rows[name])
        while len(self._keys) >= self._group:
            self._flush(self._group)

    def finish(self, failures: Sequence[Failure]) -> int:
        if self._keys or self._error is not None:
            self._flush(len(self._keys))
        reach("before the footer")
        footer: dict[str, Any] = {"about": self._about, "rows": self._count, "failures": list(map(list, failures))}
        if isinstance(self._file, _ArrowFile):
            footer["checksum"] = self._file.checksum
        self._file.close(json.dumps(footer))
        reach("after the footer")
        return self._count

    def abandon(self) -> None:
        self._file.close("{}")

    def _flush(self, count: int) -> None:
        if self._error is not None:
            raise self._error
        try:
            self._write(count)
        except Exception as error:
            self._error = error
            raise

    def _write(self, count: int) -> None:
        reach("before the first rows")
        arrays = [self._arrow.array(self._keys[:count], self._arrow.string())]
        self._keys = self._keys[count:]
        for column in self._columns:
            rows = self._rows[column.name]
            held = rows[0] if len(rows) == 1 else torch.cat(rows)
            arrays.append(_array(self._arrow, held[:count], column))
            self._rows[column.name] = [held[count:]]
        self._file.write(self._arrow.record_batch(arrays, schema=self._schema))
        self._count += count
        reach("after the first rows")


def _rows_of_group(columns: Sequence[Column]) -> int:
    """Return how many rows of Parquet are written together: in memory they are held several times."""
    return max(1, min(_ROWS_OF_PARQUET, _BYTES_OF_PARQUET // sum(column.bytes for column in columns)))


class _ParquetFile:
    def __init__(self, path: Path, schema: Any) -> None:
        parquet = require("pyarrow.parquet", "pyarrow writes features")
        self._writer = parquet.ParquetWriter(
            path, schema, compression="none", use_dictionary=False, write_statistics=False, write_page_checksum=True
        )

    def write(self, batch: Any) -> None:
        self._writer.write_batch(batch)

    def close(self, footer: str) -> None:
        self._writer.add_key_value_metadata({_FOOTER.decode(): footer})
        self._writer.close()


class _ArrowFile:
    def __init__(self, path: Path, schema: Any) -> None:
        self._arrow = require("pyarrow", "pyarrow writes features")
        self._schema = schema
        self._sink = self._arrow.OSFile(str(path), "wb")
        self._writer = self._arrow.ipc.new_file(self._sink, schema)
        self.checksum = 0

    def write(self, batch: Any) -> None:
        self.checksum = _checksum(batch, self.checksum)
        self._writer.write_batch(batch)

    def close(self, footer: str) -> None:
        # The metadata of the schema stands at the start of the file, before it is known what fails.
        empty = self._schema.empty_table().to_batches() or [
            self._arrow.record_batch([self._arrow.array([], each.type) for each in self._schema], schema=self._schema)
        ]
        self._writer.write_batch(empty[0], custom_metadata={_FOOTER.decode(): footer})
        self._writer.close()
        self._sink.close()


def _schema(arrow: Any, columns: Sequence[Column]) -> Any:
    fields = [arrow.field(KEY, arrow.string(), nullable=False)]
    for column in columns:
        kind = getattr(arrow, _TYPES[column.dtype])()
        # Lists of one length, which datasets, polars and DuckDB read; Arrow's tensors are not read by all of them.
        kind = arrow.list_(arrow.field("item", kind, nullable=False), math.prod(column.shape)) if column.shape else kind
        shape = {_SHAPE: json.dumps(list(column.shape))}
        fields.append(arrow.field(column.name, kind, nullable=False, metadata=shape))
    return arrow.schema(fields)


def _array(arrow: Any, rows: torch.Tensor, column: Column) -> Any:
    numbers = arrow.array(rows.contiguous().reshape(-1).numpy())
    if not column.shape:
        return numbers
    kind = arrow.field("item", numbers.type, nullable=False)
    return arrow.FixedSizeListArray.from_arrays(numbers, type=arrow.list_(kind, math.prod(column.shape)))
