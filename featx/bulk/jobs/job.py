"""Jobs: what the features of a folder depend on, which samples they have, and how these are divided into shards."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from featx.bulk.extras import require
from featx.bulk.storage.failpoints import reach
from featx.bulk.storage.folder import Folder, told_of_writes
from featx.bulk.storage.formats import KEY, Column, Format, reading
from featx.checksums import checksum_of, with_checksum, without_checksum
from featx.errors import ExtractionError

# The list of keys is Parquet under a name that no reader of data sets takes for a part of the features.
JOB_FILE, KEYS_FILE = "_job.json", "_keys"
_SHOWN = 200
# What is noted of a sample that cannot be read when a job starts; another start may read it.
UNKNOWN = "?"
# Parts of the identity that are told apart by a hash of code and of what objects hold.
_WITH_STATE = ("modules", "transform", "decoder")
_STATE = (
    " That is a hash of code, and of what objects hold: a counter or a cache that is filled while it runs counts too. "
    "If that is all, go on with a fresh object, or in a new process."
)


@dataclass(frozen=True)
class Job:
    """What is in the job file.

    Attributes:
        identity: all that the features depend on, by name; a job that differs in one of these is another one.
        samples: how many there are.
        rows_per_shard: how many samples a shard has; the last one may have fewer.
        format: of the shards.
        columns: what each sample gives.
        recorded: what else is worth knowing: batch size, device, versions of libraries.
    """

    identity: Mapping[str, Any]
    samples: int
    rows_per_shard: int
    format: Format
    columns: tuple[Column, ...]
    recorded: Mapping[str, Any]

    @property
    def digest(self) -> str:
        """A hash of the identity, which each shard holds."""
        return checksum_of(self.identity)

    @property
    def shards(self) -> int:
        """How many shards there are."""
        return -(-self.samples // self.rows_per_shard)

    @property
    def bytes(self) -> int:
        """How many bytes the values of all samples take."""
        return self.samples * sum(column.bytes for column in self.columns)

    def name(self, shard: int) -> str:
        """Return the name of the file of a shard."""
        return f"part-{shard:06d}-of-{self.shards:06d}.{self.format}"

    def numbers(self, shard: int) -> range:
        """Return the numbers of the samples of a shard."""
        return range(shard * self.rows_per_shard, min((shard + 1) * self.rows_per_shard, self.samples))

    def to_json(self) -> bytes:
        """Return the text of the job file, with a checksum of what it says."""
        columns = [[each.name, list(each.shape), str(each.dtype).removeprefix("torch.")] for each in self.columns]
        return json.dumps(with_checksum({**vars(self), "columns": columns}), indent=1, sort_keys=True).encode()


def read_job(folder: Folder) -> Job | None:
    """Return the job of a folder; None if it has none.

    Raises:
        ExtractionError: the job file is not one of featx, or not as it was written.
    """
    if JOB_FILE not in folder.names():
        return None
    try:
        found = without_checksum(json.loads(folder.read(JOB_FILE)))
        if found is None:
            raise ValueError("it says something else than was written")
        columns = tuple(Column(name, tuple(shape), getattr(torch, dtype)) for name, shape, dtype in found["columns"])
        found["columns"] = columns
        return Job(**found)
    except (ValueError, TypeError, KeyError, AttributeError, OSError) as error:
        raise ExtractionError(
            f"'{folder.place(JOB_FILE)}' is no job file of featx, or is damaged: {error}. Put back a copy of it, or "
            "choose another folder"
        ) from error


def start_job(folder: Folder, job: Job, keys: Sequence[str], asked: Mapping[str, Any]) -> Job:
    """Return the job of a folder, which is `job` if there was none yet: then its files are written.

    Args:
        folder: where the features go.
        job: what is to be done.
        keys: those of the samples, in the order of their numbers.
        asked: what the user has chosen of the division into shards; it has to be that of the job that is there.

    Raises:
        ExtractionError: the folder belongs to another job; the message names what differs.
    """
    there = read_job(folder)
    if there is None:
        reach("before the job file")
        with told_of_writes(folder):
            folder.create(JOB_FILE, job.to_json())
        reach("after the job file")
        there = read_job(folder)  # of another process, if that was faster
        assert there is not None
    absent = dict.fromkeys(name for name in there.identity if name not in job.identity)
    for name, value in {**job.identity, **asked, **absent}.items():
        theirs = there.identity.get(name, getattr(there, name, None))
        if theirs != value and name == "keys":
            raise ExtractionError(
                f"'{folder.path}' has the features of other samples: {_other_samples(folder, keys)}. Choose another "
                "folder for these"
            )
        if theirs != value and not (name == "sample" and _may_be_same_samples(theirs, value)):
            state = _STATE if name in _WITH_STATE else ""
            raise ExtractionError(
                f"'{folder.path}' has the features of another job: its {name} {_difference(theirs, value)}.{state} "
                "Choose another folder for this one"
            )
    if KEYS_FILE not in folder.names():  # after the job file: only who has the job may write its keys
        with told_of_writes(folder):
            write_keys(folder, keys)
    return there


def _may_be_same_samples(one: object, other: object) -> bool:
    """Say whether two texts of `FirstSample` may be of one source: samples that could not be read say nothing."""
    pairs = str(one).split(" "), str(other).split(" ")
    return len(pairs[0]) == len(pairs[1]) and all(a == b or UNKNOWN in (a, b) for a, b in zip(*pairs, strict=True))


def _other_samples(folder: Folder, keys: Sequence[str]) -> str:
    """Say which samples a folder has in place of these."""
    if KEYS_FILE not in folder.names():
        return "its keys differ"
    there = read_keys(folder)
    first = next((number for number, (one, other) in enumerate(zip(there, keys, strict=False)) if one != other), None)
    count = f"it has {len(there)}, and here are {len(keys)}"
    if first is None:
        return f"{count}; all that both have are the same"
    return f"{count}; number {first} is {there[first]!r} there, and {keys[first]!r} here"


def read_keys(folder: Folder) -> list[str]:
    """Return the keys of the samples of a job, in the order of their numbers.

    Raises:
        ExtractionError: bytes of the file have changed.
    """
    parquet = require("pyarrow.parquet", "pyarrow reads features")
    file, next_step = folder.opened(KEYS_FILE), "remove that file, and run the job again, which writes it again"
    with reading(file, next_step):
        table = parquet.ParquetFile(file).read()
    if KEY not in table.column_names:
        raise ExtractionError(f"'{folder.place(KEYS_FILE)}' has no column '{KEY}'; {next_step}")
    return cast("list[str]", table.column(KEY).to_pylist())


def hash_of_keys(keys: Sequence[str]) -> str:
    """Return a hash of keys in their order."""
    digest = hashlib.sha256()
    for key in keys:
        data = key.encode("utf-8", "surrogateescape")
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def hash_of_weights(module: nn.Module) -> str:
    """Return a hash of parameters and buffers, with their names. About a second for a gigabyte."""
    digest = hashlib.sha256()
    for name, tensor in sorted([*module.named_parameters(), *module.named_buffers()], key=lambda item: item[0]):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        digest.update(values.numpy().data)
    return digest.hexdigest()


def write_keys(folder: Folder, keys: Sequence[str]) -> None:
    """Write the keys of the samples of a job, which `read_keys` reads."""
    arrow = require("pyarrow", "pyarrow writes features")
    parquet = require("pyarrow.parquet", "pyarrow writes features")
    reach("before the key list")
    temporary = folder.temporary(KEYS_FILE)
    try:
        parquet.write_table(arrow.table({KEY: arrow.array(keys, arrow.string())}), temporary)
        folder.publish(temporary, KEYS_FILE)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    reach("after the key list")


def _difference(theirs: Any, ours: Any) -> str:
    """Say what differs: of long texts, from where they do."""
    texts = [value if isinstance(value, str) else json.dumps(value) for value in (theirs, ours)]
    pairs = enumerate(zip(*texts, strict=False))
    start = next((place for place, (one, other) in pairs if one != other), 0)
    start = max(0, start - _SHOWN // 4) if max(map(len, texts)) > _SHOWN else 0
    shown = [repr(("..." if start else "") + _cut(text[start:])) for text in texts]
    return f"is {shown[0]}, and here it is {shown[1]}"


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
