"""Lists of paths or texts: lines of a file, and columns of tables."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from io import BytesIO, StringIO
from itertools import chain
from pathlib import Path
from typing import Any, cast

from featx.bulk.extras import require
from featx.bulk.storage.files import SUFFIXES
from featx.errors import ArgumentTypeError, ExtractionError

LISTS = frozenset({".txt", ".csv", ".parquet"})
# Of the columns of a data set, those that hold images; the first one counts.
IMAGE_COLUMNS = ("image", "img", "pixel_values")
# Of the columns of a table, those that hold paths; the first one counts.
PATH_COLUMNS = ("path", "url", "file", "file_name", "filename", "image_path", "image")
# Libraries whose columns and one-dimensional arrays count as lists.
_LIBRARIES = frozenset({"pandas", "polars", "pyarrow", "numpy"})


def read_list(path: str, data: bytes, column: str | None) -> list[str]:
    """Return the lines of a text, or a column of a table.

    Args:
        path: what the file is called.
        data: what is in it.
        column: which column; by default one of a usual name. The only column of a CSV may have no header.

    Raises:
        ExtractionError: it cannot be read, a row has no value, or it is not clear which column is meant.
        ArgumentTypeError: a column of a text is asked for.
    """
    suffix = Path(path).suffix.lower()
    if suffix == ".parquet":
        return _of_parquet(path, data, column)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ExtractionError(f"'{path}' is no text in UTF-8 (byte {error.start}); save it as UTF-8") from error
    if suffix == ".csv":
        return _of_csv(path, text, column)
    refuse_column(column, f"the text '{path}'")
    return [line for line in map(str.strip, text.splitlines()) if line]


def refuse_column(column: str | None, kind: str) -> None:
    """Raise where a column is asked for of what has none.

    Raises:
        ArgumentTypeError: so it is.
    """
    if column is not None:
        raise ArgumentTypeError(f"column='{column}' is for tables and data sets, and {kind} has no columns")


def values_of(source: Any, column: str | None) -> list[Any] | None:
    """Return a column of pandas, polars or pyarrow, or an array of texts of numpy, as a list; None for anything else.

    Raises:
        ExtractionError: it is not clear which column of a table is meant.
    """
    package = type(source).__module__.partition(".")[0]
    if package not in _LIBRARIES:
        return None
    if hasattr(source, "columns"):
        if not hasattr(source, "__len__"):
            raise ExtractionError(f"a {type(source).__name__} is not computed yet: collect it first")
        columns = list(getattr(source, "column_names", None) or source.columns)
        names = [str(each) for each in columns]
        chosen = _chosen(f"the {type(source).__name__}", names, None if column is None else str(column))
        source = source[columns[names.index(chosen)]]
    if package == "numpy" and (source.ndim != 1 or source.dtype.kind not in "OU"):
        return None
    convert = next(getattr(source, each) for each in ("to_pylist", "to_list", "tolist") if hasattr(source, each))
    return cast("list[Any]", convert())


def _of_csv(path: str, text: str, column: str | None) -> list[str]:
    lines = csv.reader(StringIO(text, newline=""))
    rows = ((lines.line_num, row) for row in lines if row)
    header = next(rows, None)
    if header is None:
        raise ExtractionError(f"'{path}' is empty")
    names = [name.strip() for name in header[1]]
    if column is None and len(names) == 1 and _is_path(names[0]):
        place, rows = 0, chain([header], rows)
    else:
        place = names.index(_chosen(f"'{path}'", names, column))
    return list(_column(path, rows, place, len(names)))


def _column(path: str, rows: Iterable[tuple[int, list[str]]], place: int, width: int) -> Iterable[str]:
    for line, row in rows:
        if len(row) != width:
            raise ExtractionError(f"line {line} of '{path}' has {len(row)} values, and the first line has {width}")
        if not row[place].strip():
            raise ExtractionError(f"line {line} of '{path}' has no value in the column that is read; take it out")
        yield row[place].strip()


def _of_parquet(path: str, data: bytes, column: str | None) -> list[str]:
    arrow = require("pyarrow", "pyarrow reads Parquet")
    try:
        table = require("pyarrow.parquet", "pyarrow reads Parquet").read_table(BytesIO(data))
    except (arrow.ArrowException, OSError) as error:
        raise ExtractionError(f"'{path}' cannot be read as Parquet: {error}") from error
    chosen = _chosen(f"'{path}'", table.column_names, column)
    values: list[Any] = table.column(chosen).to_pylist()
    for row, value in enumerate(values):
        if isinstance(value, (dict, bytes)):
            raise ExtractionError(
                f"column '{chosen}' of '{path}' holds images and no paths; open it as a data set, and give that: "
                f"datasets.load_dataset('parquet', data_files='{path}', split='train')"
            )
        if value is None or value == "":
            raise ExtractionError(f"row {row} of '{path}' has no value in column '{chosen}'; take it out")
    return [str(value) for value in values]


def _chosen(what: str, names: Sequence[str], column: str | None) -> str:
    chosen = column or next((each for each in PATH_COLUMNS if each in names), None)
    if chosen is None or chosen not in names:
        raise ExtractionError(f"{what} has the columns {', '.join(names)}; say which one, by column=...")
    return chosen


def _is_path(text: str) -> bool:
    return "://" in text or Path(text).suffix.lower() in SUFFIXES
