"""The first sample of a source: the example for the trace, and what tells a source from another with the same keys."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from featx.bulk.fingerprint import fingerprint
from featx.bulk.job import UNKNOWN, Job
from featx.bulk.loading import as_input, reason_of
from featx.bulk.reading import Reader
from featx.bulk.sources import Rows, Source
from featx.errors import ArgumentTypeError, ExtractionError

_TRIED_SAMPLES = 100
# Each of these takes as long as `timeout` allows, five minutes by default.
_TRIED_SAMPLES_THAT_HANG = 3
# What is noted of a sample whose input is another one each time.
DIFFERS = "differs each time"
# So many inputs of a data set, whose keys are numbers, tell it from another one.
_OTHER_SAMPLES = 8


@dataclass(frozen=True)
class FirstSample:
    """The first input of a source that can be read.

    Attributes:
        value: the input.
        text: the number of the sample, and a hash of the input; of a data set of some others too.
    """

    value: Any
    text: str

    @staticmethod
    def of(source: Source, reader: Reader, job: Job | None, timeout: float) -> FirstSample:
        """Read the first sample that can be read, or the one that the job of the folder has read.

        Raises:
            ExtractionError: none of the first samples can be read, each within `timeout` seconds.
        """
        seen = None if job is None else str(job.identity.get("sample", "")).partition(" ")[0]
        first = [int(seen)] if seen and int(seen) < len(source.keys) else []
        numbers = dict.fromkeys([*first, *range(min(len(source.keys), _TRIED_SAMPLES))])
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
                return FirstSample(value, f"{seen or number} {DIFFERS}")
            known = hashes.pop() if seen in (None, "", str(number)) else UNKNOWN
            others = _hashes_of_others(source, reader, timeout)
            return FirstSample(value, " ".join([seen or str(number), known, *others]))
        is_array = "ndarray" in source.kind
        hint = ". The transform is given arrays; if it is for PIL images, give a list of these" if is_array else ""
        raise ExtractionError(
            f"none of the first {len(reasons)} samples of {source.kind} can be read: {reasons[0]}{hint}"
        )


def _hashes_of_others(source: Source, reader: Reader, timeout: float) -> Iterator[str]:
    """Yield hashes of some inputs of a source whose keys are numbers alone, so that another one has the same keys."""
    if not isinstance(source, Rows):
        return
    count = len(source.keys)
    for number in sorted({count * part // _OTHER_SAMPLES for part in range(1, _OTHER_SAMPLES)} | {count - 1}):
        try:
            yield fingerprint(_read(source, reader, number, timeout))
        except Exception:  # it will be a failure
            yield UNKNOWN


def _read(source: Source, reader: Reader, number: int, timeout: float) -> Any:
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
