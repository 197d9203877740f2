"""Read features back: by key, by number, as tensors, as a torch Dataset; and verify that nothing is missing."""

from __future__ import annotations

import bisect
import operator
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch.utils.data import Dataset

from featx.bulk.jobs.job import KEYS_FILE, Job, hash_of_keys, read_job, read_keys
from featx.bulk.jobs.shards import finished
from featx.bulk.storage.folder import Folder
from featx.bulk.storage.formats import (
    KEY,
    NEXT_STEP,
    Column,
    Failure,
    Footer,
    checksum_of,
    has_columns,
    read_table,
    tensor_of,
)
from featx.bulk.storage.parts import Parts, RowReader
from featx.bulk.storage.remote import open_folder
from featx.errors import ArgumentTypeError, ExtractionError


def open_features(folder: str | os.PathLike[str]) -> FeatureTable:
    """Return the features that `extract` has written to a folder, as far as they are there.

    What shards there are is read when it is first asked for. O(shards).

    Args:
        folder: its path, or a URL that fsspec knows.

    Raises:
        ExtractionError: the folder has no features.
    """
    place = open_folder(folder)
    job = read_job(place)
    if job is None:
        raise ExtractionError(f"'{place.path}' has no features: featx.extract writes them, with a job file")
    return FeatureTable(place, job)


class FeatureTable(Dataset[dict[str, Any]]):
    """Features of samples, in the order of the samples; a torch Dataset of dicts with the key and a tensor for each.

    Args:
        folder: where the files are.
        job: what is in them.
    """

    def __init__(self, folder: Folder, job: Job) -> None:
        self._folder = folder
        self.job = job
        self._rows = RowReader(self._parts)

    @property
    def columns(self) -> tuple[Column, ...]:
        """What each sample has: names, shapes and dtypes."""
        return self.job.columns

    @property
    def missing(self) -> list[int]:
        """The shards that are not there, or not whole."""
        return [shard for shard in range(self.job.shards) if shard not in self._footers]

    @property
    def is_complete(self) -> bool:
        """Whether all shards are there."""
        return not self.missing

    @property
    def errors(self) -> list[Failure]:
        """The samples that failed: keys and reasons."""
        return [failure for shard in self._shards for failure in self._footers[shard].failures]

    @cached_property
    def keys(self) -> list[str]:
        """The keys of the rows, in their order. O(rows)."""
        return [key for shard in self._shards for key in self._column(shard, KEY).to_pylist()]

    @property
    def paths(self) -> list[str]:
        """The files of the shards that are there, which other tools read."""
        return [self._folder.place(self.job.name(shard)) for shard in self._shards]

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[number] for number in range(len(self)))

    def __getitem__(self, number: int) -> dict[str, Any]:
        """Return a row by its number: its key, and a tensor for each feature.

        The parts of the files that were read last are kept, up to 512 MB of vectors. Maps are read one by one.

        Raises:
            IndexError: there are not so many rows.
            ArgumentTypeError: `number` is something else, such as a slice.
        """
        if not hasattr(number, "__index__"):
            raise ArgumentTypeError(
                f"rows are read one by one, by number, or by key with table.get; got {number!r:.80}. For several rows "
                "use [table[number] for number in range(...)], for all of them table.tensor(name)"
            )
        number = operator.index(number)
        if not -len(self) <= number < len(self):
            raise IndexError(f"row {number} of {len(self)}")
        number %= len(self)
        place = bisect.bisect_right(self._ends, number)
        return self._rows.row(self._shards[place], number - (self._ends[place - 1] if place else 0))

    def __contains__(self, key: object) -> bool:
        """Say whether there is a row with this key. The first call reads all keys."""
        return (isinstance(key, str) or hasattr(key, "__index__")) and str(key) in self._places

    def get(self, key: str | int) -> dict[str, Any]:
        """Return a row by its key, or by the number of a sample of a data set. The first call reads all keys.

        Raises:
            ExtractionError: there is no such row; the message says whether the sample has failed.
        """
        key = str(key)
        place = self._places.get(key)
        if place is None:
            reason = dict(self.errors).get(key)
            raise ExtractionError(
                f"'{key}' has no features" + (f": {reason}" if reason else "; table.keys has those that there are")
            )
        row = self[place]
        if row[KEY] != key:
            raise self._changed()
        return row

    def tensor(self, name: str) -> torch.Tensor:
        """Return one feature of all rows, of shape (rows, ...). It is read into memory.

        Raises:
            ArgumentTypeError: there is no such feature.
        """
        column = next((each for each in self.columns if each.name == name), None)
        if column is None:
            raise ArgumentTypeError(
                f"there is no feature '{name}'; there are {', '.join(c.name for c in self.columns)}"
            )
        parts = [tensor_of(self._column(shard, name), column) for shard in self._shards]
        return torch.cat(parts) if parts else torch.empty(0, *column.shape, dtype=column.dtype)

    @cached_property
    def _footers(self) -> dict[int, Footer]:
        return finished(self.job, self._folder, range(self.job.shards))

    @cached_property
    def _shards(self) -> list[int]:
        return sorted(self._footers)

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(self._footers[shard].rows for shard in self._shards))

    @cached_property
    def _places(self) -> dict[str, int]:
        return {key: place for place, key in enumerate(self.keys)}

    def _column(self, shard: int, name: str) -> Any:
        found = read_table(self._folder.opened(self.job.name(shard)), self.job.format, [name]).column(name)
        if len(found) != self._footers[shard].rows:
            raise self._changed()
        return found

    def _changed(self) -> ExtractionError:
        return ExtractionError(
            f"'{self._folder.path}' has been written since it was opened, as by extract(..., retry=True); open it "
            "again, by featx.open_features"
        )

    def _parts(self, shard: int) -> Parts:
        parts = Parts(self._folder.opened(self.job.name(shard)), self.job.format, self.columns)
        if (parts.ends or [0])[-1] != self._footers[shard].rows:
            raise self._changed()
        return parts

    def __repr__(self) -> str:
        columns = ", ".join(f"{each.name} {'x'.join(map(str, each.shape)) or 'scalar'}" for each in self.columns)
        missing = f", {len(self.missing)} of {self.job.shards} shards missing" if self.missing else ""
        return f"FeatureTable({len(self)} rows of {columns}; {len(self.errors)} errors{missing})"


@dataclass(frozen=True)
class Verification:
    """What was found in a folder of features.

    Attributes:
        samples: how many keys the job has.
        rows: how many have features.
        failures: how many have failed.
        faults: what is wrong, one line each: shards that are missing or not whole, keys that are lost or doubled.
        unfinished: files that are being written now, or were when a process was killed. They may be removed once no
            job runs.
    """

    samples: int
    rows: int
    failures: int
    faults: tuple[str, ...]
    unfinished: tuple[str, ...]

    @property
    def is_complete(self) -> bool:
        """Whether each key is in exactly one of rows and failures."""
        return not self.faults

    def __str__(self) -> str:
        lines = [f"{self.samples} samples: {self.rows} rows, {self.failures} failures"]
        lines += self.faults or ["each key is in exactly one of rows and failures"]
        if self.unfinished:
            lines.append(f"{len(self.unfinished)} unfinished files, such as {self.unfinished[0]}")
        return "\n".join(lines)


def verify(folder: str | os.PathLike[str]) -> Verification:
    """Read all features of a folder, and say whether each key of the job is in exactly one of rows and failures.

    O(bytes); the pages of Parquet files, and the values of Arrow files, are compared with their checksums.

    Raises:
        ExtractionError: the folder has no features.
    """
    place = open_folder(folder)
    table = open_features(folder)
    job = table.job
    if KEYS_FILE not in place.names():
        raise ExtractionError(
            f"'{place.path}' has lost its list of keys, '{KEYS_FILE}'; run the job again, which writes it"
        )
    keys, faults, rows, failures = read_keys(place), list[str](), 0, 0
    if hash_of_keys(keys) != job.identity.get("keys"):
        faults.append(f"'{KEYS_FILE}' is not the list of keys of this job; remove it, and run the job again")
        return Verification(job.samples, 0, 0, tuple(faults), tuple(place.unfinished()))
    for shard in range(job.shards):
        name = job.name(shard)
        if shard in table.missing:
            faults.append(f"{name} is {'not whole' if name in place.names() else 'missing'}; run the job again")
            continue
        footer = table._footers[shard]
        try:
            rows_of_shard = read_table(place.opened(name), job.format)
        except ExtractionError as error:
            faults.append(str(error))
            continue
        if not has_columns(rows_of_shard, job.columns):
            faults.append(f"{name} has other columns than the job; {NEXT_STEP}")
            continue
        if footer.checksum is not None and checksum_of(rows_of_shard) != footer.checksum:
            faults.append(f"{name} has other values than were written; {NEXT_STEP}")
            continue
        found = rows_of_shard.column(KEY).to_pylist()
        rows += len(found)
        failures += len(footer.failures)
        expected = [keys[number] for number in job.numbers(shard)]
        failed = {key for key, _ in footer.failures}
        if found != [key for key in expected if key not in failed] or len(found) + len(failed) != len(expected):
            faults.append(f"{name} has other keys than the list of keys says; {NEXT_STEP}")
    return Verification(job.samples, rows, failures, tuple(faults), tuple(place.unfinished()))
