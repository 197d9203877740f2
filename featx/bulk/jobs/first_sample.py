"""The first sample of a source: the example for the trace, and what tells a source from another with the same keys."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from featx.bulk.jobs.job import UNKNOWN, Job
from featx.bulk.samples.loading import ProcessError, Samples, as_input, batches, reason_of
from featx.bulk.samples.reading import Reader
from featx.bulk.samples.sources import Source
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
class FirstSample:
    """The first input of a source that can be read.

    Attributes:
        value: the input.
        text: the number of the sample, and hashes of the input and of some others, spread over the source; where the
            transform draws, of what it is given.
    """

    value: Any
    text: str

    @staticmethod
    def of(source: Source, reader: Reader, job: Job | None, timeout: float, workers: int) -> FirstSample:
        """Read the first sample that can be read, or the one that the job of the folder has read.

        Others are read in a process of their own, if `workers` are.

        Raises:
            ExtractionError: none of the first samples can be read, each within `timeout` seconds.
        """
        seen = None if job is None else str(job.identity.get("sample", "")).partition(" ")[0]
        first = [int(seen)] if seen and int(seen) < len(source.keys) else []
        count = len(source.keys)
        spread = range(0, count, -(-count // _TRIED_SPREAD) or 1)
        numbers = dict.fromkeys([*first, *range(min(count, _TRIED_SAMPLES)), *spread])
        reasons: list[str] = []
        hanging = 0
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
            hashes = {fingerprint(value), fingerprint(again)}
            if len(hashes) > 1:
                return FirstSample(value, " ".join([seen or str(number), *_hashes_of_items(source, timeout), DIFFERS]))
            known = hashes.pop() if seen in (None, "", str(number)) else UNKNOWN
            others = _hashes_of_others(source, _Hashed(reader), timeout, workers)
            return FirstSample(value, " ".join([seen or str(number), known, *others]))
        is_array = "ndarray" in source.kind
        hint = ". The transform is given arrays; if it is for PIL images, give a list of these" if is_array else ""
        raise ExtractionError(f"none of {len(reasons)} samples of {source.kind} can be read: {reasons[0]}{hint}")


def _hashes_of_items(source: Source, timeout: float) -> list[str]:
    """Return hashes of some samples as they are before the transform, which draws; none of one that draws itself."""
    pairs = zip(*(_hashes_of_others(source, _hash_of_item, timeout, workers=0) for _ in range(2)), strict=True)
    return [one if one == other else UNKNOWN for one, other in pairs]


def _hash_of_item(item: Any) -> torch.Tensor:
    if isinstance(item, (str, os.PathLike)) and os.path.isfile(item):
        item = Path(item).read_bytes()
    return _digest(item)


def _digest(value: Any) -> torch.Tensor:
    return torch.tensor(list(hashlib.sha256(fingerprint(value).encode()).digest()), dtype=torch.uint8)


def _hashes_of_others(source: Source, hashed: Callable[[Any], torch.Tensor], timeout: float, workers: int) -> list[str]:
    """Return hashes of some samples, spread over a source: files may have been changed under the same names."""
    count = len(source.keys)
    numbers = sorted({count * part // _OTHER_SAMPLES for part in range(1, _OTHER_SAMPLES)} | {count - 1})
    if workers:  # which a sample may end
        read = batches(Samples(source, hashed), [[number] for number in numbers], workers=1, timeout=timeout)
        with suppress(ProcessError):
            return [_text_of(batch.groups[0][1]) if batch.groups else UNKNOWN for batch in read]
    found: list[str] = []
    for number in numbers:
        try:
            found.append(_text_of(_read(source, hashed, number, timeout)))
        except Exception:  # it will be a failure
            found.append(UNKNOWN)
    return found


def _text_of(digest: torch.Tensor) -> str:
    return bytes(digest.flatten().tolist()).hex()


class _Hashed:
    """Reads the hash of an input, which takes no shared memory to send."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    def __call__(self, item: Any) -> torch.Tensor:
        return _digest(as_input(self._reader(item)))


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
