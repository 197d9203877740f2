"""The first sample of a source: the example for the trace, and what tells a source from another with the same keys."""

from __future__ import annotations

import functools
import hashlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from featx.bulk.jobs.job import UNKNOWN, Job
from featx.bulk.samples.loading import ProcessError, Samples, as_input, batches, reason_of, stacked
from featx.bulk.samples.reading import Reader
from featx.bulk.samples.sources import Paths, Source
from featx.errors import ArgumentTypeError, ExtractionError
from featx.fingerprint import fingerprint

# Of the first samples, and of those spread over a source.
_TRIED_SAMPLES, _TRIED_SPREAD = 100, 20
# Each of these takes as long as `timeout` allows, five minutes by default.
_TRIED_SAMPLES_THAT_HANG = 3
# What is noted of a sample whose input is another one each time.
DIFFERS = "differs each time"
# So many inputs tell a source from another one that has the same keys.
_OTHER_SAMPLES = 8


@dataclass(frozen=True)
class Readable:
    """A sample that can be read.

    Attributes:
        number: which one.
        value: the input.
        hash: of the input; None where it is another one each time.
    """

    number: int
    value: Any
    hash: str | None


def readable_samples(source: Source, reader: Reader, job: Job | None, timeout: float) -> Iterator[Readable]:
    """Yield samples that can be read: first the one that the job of the folder began with, if it has one.

    Raises:
        ExtractionError: none of the first samples, and of some others, can be read, each within `timeout` seconds.
    """
    count, seen = len(source.keys), _number_in(job)
    first = [int(seen)] if seen and int(seen) < count else []
    spread = range(0, count, -(-count // _TRIED_SPREAD) or 1)
    reasons: list[str] = []
    hanging = 0
    has_found = False
    numbers = dict.fromkeys([*first, *range(min(count, _TRIED_SAMPLES)), *spread])
    for number in numbers:
        try:
            value, again = (_read(source, reader, number, timeout) for _ in range(2))
        except ArgumentTypeError:
            raise
        except Exception as error:  # whatever a file or a function of the user's leads to
            reasons.append(f"'{source.keys[number]}': {reason_of(error)}")
            hanging += isinstance(error, TimeoutError)
            if hanging == _TRIED_SAMPLES_THAT_HANG:
                break
            continue
        has_found = True
        hashes = {fingerprint(value), fingerprint(again)}
        yield Readable(number, value, None if len(hashes) > 1 else hashes.pop())
    if not has_found:
        hint = _hint(source, numbers)
        raise ExtractionError(f"none of {len(reasons)} samples of {source.kind} can be read: {reasons[0]}{hint}")


def _hint(source: Source, numbers: Iterable[int]) -> str:
    """Return what may be wrong where none of some samples can be read."""
    if "ndarray" in source.kind:
        return ". The transform is given arrays; if it is for PIL images, give a list of these"
    if isinstance(source, Paths):
        there = next((source.keys[number] for number in numbers if source.is_misplaced(number)), None)
        if there is not None:
            return (
                f". Paths are read from the folder '{source.root}', and '{there}' is below the working directory, "
                f"'{os.getcwd()}': put the list there, or write absolute paths"
            )
    return ""


def _number_in(job: Job | None) -> str:
    return "" if job is None else str(job.identity.get("sample", "")).partition(" ")[0]


@dataclass(frozen=True)
class FirstSample:
    """The first input of a source that can be read, and for which the model does not raise.

    Attributes:
        value: the input.
        text: the number of the sample, and hashes of the input and of some others, spread over the source; where the
            transform draws, of what it is given.
        others: the inputs of these others that can be read, each as a batch of one; none where nobody asked for them.
    """

    value: Any
    text: str
    others: Sequence[Any] = ()

    @staticmethod
    def of(
        first: Readable, source: Source, reader: Reader, job: Job | None, timeout: float, workers: int, *,
        keeps_others: bool,
    ) -> FirstSample:  # fmt: skip
        """Return a sample with the hashes of others, which are read in a process of their own, if `workers` are.

        `keeps_others`: their inputs are returned too.
        """
        seen = _number_in(job) or str(first.number)
        read = (
            []
            if first.hash is None and not keeps_others
            else _others(source, _Hashed(reader, keeps_input=keeps_others), timeout, workers)
        )
        others = [made[1] for made in read if made is not None] if keeps_others else []
        if first.hash is None:
            texts = [*_hashes_of_items(source, reader, timeout), DIFFERS]
        else:
            texts = [first.hash if seen == str(first.number) else UNKNOWN, *map(_text_of, read)]
        return FirstSample(first.value, " ".join([seen, *texts]), others)


def _hashes_of_items(source: Source, reader: Reader, timeout: float) -> list[str]:
    """Return hashes of some samples as they are before the transform, which draws; none of one that draws itself."""
    hashed = functools.partial(_hash_of_item, reader)
    pairs = zip(*(map(_text_of, _others(source, hashed, timeout, workers=0)) for _ in range(2)), strict=True)
    return [one if one == other else UNKNOWN for one, other in pairs]


def _hash_of_item(reader: Reader, item: Any) -> tuple[torch.Tensor]:
    item = reader.part(item)
    if isinstance(item, (str, os.PathLike)) and os.path.isfile(item):
        item = Path(item).read_bytes()
    return (_digest(item),)


def _digest(value: Any) -> torch.Tensor:
    return torch.tensor(list(hashlib.sha256(fingerprint(value).encode()).digest()), dtype=torch.uint8)


def _others(source: Source, make: Callable[[Any], Any], timeout: float, workers: int) -> list[Any]:
    """Return what is made of some samples, spread over a source, as batches of one; None where one cannot be read."""
    count = len(source.keys)
    numbers = sorted({count * part // _OTHER_SAMPLES for part in range(1, _OTHER_SAMPLES)} | {count - 1})
    if workers:  # which a sample may end
        read = batches(Samples(source, make), [[number] for number in numbers], workers=1, timeout=timeout)
        with suppress(ProcessError):
            return [batch.groups[0][1] if batch.groups else None for batch in read]
    found: list[Any] = []
    for number in numbers:
        try:
            found.append(stacked([_read(source, make, number, timeout)]))
        except Exception:  # it will be a failure
            found.append(None)
    return found


def _text_of(made: tuple[torch.Tensor, ...] | None) -> str:
    """Return the hash with which what is made of a sample begins.

    It tells other samples under the same keys: files may have been changed.
    """
    return UNKNOWN if made is None else bytes(made[0].flatten().tolist()).hex()


class _Hashed:
    """Reads the hash of an input, which takes no shared memory to send, and the input if that is kept."""

    def __init__(self, reader: Reader, *, keeps_input: bool) -> None:
        self._reader = reader
        self._keeps_input = keeps_input

    def __call__(self, item: Any) -> tuple[Any, ...]:
        value = as_input(self._reader(item))
        return (_digest(value), value) if self._keeps_input else (_digest(value),)


def _read(source: Source, reader: Callable[[Any], Any], number: int, timeout: float) -> Any:
    """Return the input of a sample.

    Raises:
        TimeoutError: reading takes too long. It goes on, in a thread that ends with the process.
        Exception: whatever reading leads to; a sample that ends the process, as `sys.exit()` does, is a RuntimeError.
    """
    found: list[Any] = []
    errors: list[BaseException] = []

    def read() -> None:
        try:
            found.append(as_input(reader(source.item(number))))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(timeout)
    if errors:
        if isinstance(errors[0], Exception):
            raise errors[0]
        raise RuntimeError(f"reading it raises {type(errors[0]).__name__}") from errors[0]
    if not found:
        raise TimeoutError(f"reading it took more than {timeout:g} s")
    return found[0]
