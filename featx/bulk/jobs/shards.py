"""Write shards: read, compute and write the samples of each, and publish its file when it is whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise, tee
from pathlib import Path
from typing import Any

import torch

from featx.bulk.jobs.compute import Runner
from featx.bulk.jobs.job import Job
from featx.bulk.jobs.progress import Progress
from featx.bulk.samples.loading import Batch, Samples, batches
from featx.bulk.storage.folder import Folder, told_of_writes
from featx.bulk.storage.formats import (
    KEY,
    Failure,
    Footer,
    Rows,
    ShardWriter,
    open_writer,
    read_footer,
    read_table,
    tensor_of,
)  # fmt: skip
from featx.errors import ExtractionError

# How many batches may wait to be written.
_WAITING = 4
# How many files are looked at at once.
_READING = 16


# The number of a shard, and those of its samples to compute; rows of others are taken from its file.
PendingShard = tuple[int, Sequence[int]]
# Such shards, by their number.
PendingSamples = Mapping[int, Sequence[int]]


@dataclass(frozen=True)
class Work:
    """What is done for a job.

    Attributes:
        job: the job.
        folder: where its files are.
        keys: those of its samples.
        samples: reads them.
        runner: computes their features.
        batch_size: how many samples run at once.
        workers: how many processes read.
        timeout: seconds that reading one sample may take in one of them.
    """

    job: Job
    folder: Folder
    keys: Sequence[str]
    samples: Samples
    runner: Runner
    batch_size: int
    workers: int
    timeout: float


def finished(job: Job, folder: Folder, shards: Iterable[int]) -> dict[int, Footer]:
    """Return what those of some shards say of themselves that are there and whole. O(shards).

    A file that is truncated, or has other samples than its name says, counts as not there.
    """
    names = folder.names()
    there = [shard for shard in shards if job.name(shard) in names]
    with ThreadPoolExecutor(_READING) as pool:
        footers = pool.map(lambda shard: _footer(job, folder, shard), there)
        return {shard: footer for shard, footer in zip(there, footers, strict=True) if footer is not None}


def _footer(job: Job, folder: Folder, shard: int) -> Footer | None:
    try:
        footer = read_footer(folder.opened(job.name(shard)), job.format)
    except ExtractionError:
        return None
    is_whole = footer.rows + len(footer.failures) == len(job.numbers(shard))
    # Somebody may have copied the file of another shard.
    is_own = footer.about.get("job") == job.digest and footer.about.get("shard") == shard
    return footer if is_whole and is_own else None


def process_shards(work: Work, todo: Iterable[PendingShard], progress: Progress) -> None:
    """Do the samples of shards, in their order.

    Args:
        work: what is done.
        todo: shards, which are taken as the processes that read have time for them. It must not raise.
        progress: is notified of each batch.

    Raises:
        ExtractionError: the folder cannot be written, or a process that reads is lost. Finished shards stay.
    """
    size, fewest = work.batch_size, work.runner.fewest
    # Batches are planned for those that read before they are computed here.
    ahead, plan = tee((shard, numbers) for shard in todo for numbers in _chunks(shard[1], size, fewest))
    found = batches(
        work.samples, (list(numbers) for _, numbers in ahead), workers=work.workers, timeout=work.timeout
    )  # fmt: skip
    with ThreadPoolExecutor(1) as pool:
        writing = _Writing(work, pool, progress)
        try:
            for (shard, _), batch in zip(plan, found, strict=True):
                writing.at(*shard)
                writing.put(*_computed(work.runner, batch))
            writing.finish()
        except BaseException:
            writing.abandon()
            raise


def _not_finite(rows: Rows) -> int:
    """Return how many rows have a value that is no finite number, as float16 gives above 65504."""
    floats = [values for values in rows.values() if values.is_floating_point() and values.numel()]
    if not floats:
        return 0
    are_finite = torch.stack([values.reshape(len(values), -1).isfinite().all(1) for values in floats]).all(0)
    return int((~are_finite).sum())


def _chunks(numbers: Sequence[int], size: int, fewest: int) -> Iterator[Sequence[int]]:
    """Yield `size` numbers each time; where fewer than `fewest` would be left, the last but one time yields fewer."""
    starts = list(range(0, len(numbers), size))
    if len(starts) > 1 and size > 2 * (fewest - 1):
        starts[-1] = min(starts[-1], len(numbers) - fewest)
    for start, end in pairwise([*starts, len(numbers)]):
        yield numbers[start:end]


def _computed(runner: Runner, batch: Batch) -> tuple[list[int], Rows, list[tuple[int, str]]]:
    """Return the numbers of samples with their rows, in the order of the numbers, and the failures."""
    several: list[tuple[list[int], Rows]] = []
    failures = list(batch.failures)
    for numbers, inputs in batch.groups:
        rows, failed = runner.compute(numbers, inputs)
        several += rows
        failures += failed
    if len(several) == 1:
        return several[0][0], several[0][1], failures
    numbers = [number for part, _ in several for number in part]
    order = sorted(range(len(numbers)), key=numbers.__getitem__)
    names = [column.name for column in runner.columns]
    rows = {name: torch.cat([part[name] for _, part in several])[order] for name in names} if several else {}
    return [numbers[place] for place in order], rows, failures


@dataclass
class _Shard:
    """A shard that is being written.

    Attributes:
        number: which one.
        path: its file until it is published.
        writer: writes its rows.
        failures: by number of the sample.
        earlier: rows of an earlier file, by number of the sample, which are not computed again.
    """

    number: int
    path: Path
    writer: ShardWriter
    failures: dict[int, str] = field(default_factory=lambda: dict[int, str]())
    earlier: dict[int, Rows] = field(default_factory=lambda: dict[int, Rows]())


class _Writing:
    """Hands rows to a thread that writes them, while the next ones are computed."""

    def __init__(self, work: Work, pool: ThreadPoolExecutor, progress: Progress) -> None:
        self._work = work
        self._pool = pool
        self._progress = progress
        self._shard: _Shard | None = None
        self._waiting: list[Future[None]] = []

    def at(self, number: int, pending: Sequence[int]) -> None:
        """Go on with a shard, of which these samples are computed; one that comes before it is finished."""
        if self._shard is not None and self._shard.number == number:
            return
        self.finish()
        job = self._work.job
        path = self._work.folder.temporary(job.name(number))
        with told_of_writes(self._work.folder):
            try:
                writer = open_writer(path, job.format, job.columns, {"job": job.digest, "shard": number})
            except BaseException:
                path.unlink(missing_ok=True)
                raise
        self._shard = _Shard(number, path, writer)
        if len(pending) < len(job.numbers(number)):
            self._shard.earlier = self._earlier(number)

    def put(self, numbers: list[int], rows: Rows, failures: list[tuple[int, str]]) -> None:
        shard = self._shard
        assert shard is not None
        shard.failures.update(failures)
        if shard.earlier or not numbers:
            shard.earlier.update(
                {
                    number: {name: values[place : place + 1] for name, values in rows.items()}
                    for place, number in enumerate(numbers)
                }
            )
        else:
            keys = [self._work.keys[number] for number in numbers]
            self._submit(shard.writer.add, keys, rows)
        size = sum(values.nbytes for values in rows.values())
        self._progress.add(len(numbers) + len(failures), size, len(failures), _not_finite(rows))

    def finish(self) -> None:
        """Publish the shard, when all of its rows are written."""
        shard = self._shard
        if shard is None:
            return
        for number in sorted(shard.earlier):
            self._submit(shard.writer.add, [self._work.keys[number]], shard.earlier[number])
        self._submit(self._publish, shard)
        self._wait(0)
        self._shard = None  # only now: after an error of a write that was waiting, its file is there still

    def abandon(self) -> None:
        """Leave the shard unfinished, after an error."""
        for each in self._waiting:
            each.cancel()
        shard, self._shard = self._shard, None
        if shard is not None:
            self._pool.submit(_close, shard)

    def _publish(self, shard: _Shard) -> None:
        failures: list[Failure] = [(self._work.keys[each], why) for each, why in sorted(shard.failures.items())]
        try:
            rows, expected = shard.writer.finish(failures), len(self._work.job.numbers(shard.number))
            if rows + len(failures) != expected:
                raise ExtractionError(
                    f"{rows} rows and {len(failures)} failures were written of the {expected} samples of shard "
                    f"{shard.number}, which is left unfinished; start the job again to go on"
                )
            self._work.folder.publish(shard.path, self._work.job.name(shard.number))
        except BaseException:
            shard.path.unlink(missing_ok=True)
            raise

    def _earlier(self, number: int) -> dict[int, Rows]:
        job, keys = self._work.job, self._work.keys
        table = read_table(self._work.folder.opened(job.name(number)), job.format)
        of_key = {keys[each]: each for each in job.numbers(number)}
        columns = {column.name: tensor_of(table.column(column.name), column) for column in job.columns}
        return {
            of_key[key]: {name: values[place : place + 1] for name, values in columns.items()}
            for place, key in enumerate(table.column(KEY).to_pylist())
        }

    def _submit(self, function: Any, *args: Any) -> None:
        self._waiting.append(self._pool.submit(function, *args))
        self._wait(_WAITING)

    def _wait(self, most: int) -> None:
        while len(self._waiting) > most:
            with told_of_writes(self._work.folder):
                self._waiting.pop(0).result()


def _close(shard: _Shard) -> None:
    try:
        shard.writer.abandon()
    finally:
        shard.path.unlink(missing_ok=True)
