"""The first sample of a source: the example for the trace, and what tells a source from another with the same keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from featx.bulk.fingerprint import fingerprint
from featx.bulk.job import Job
from featx.bulk.loading import as_input, reason_of
from featx.bulk.reading import Reader
from featx.bulk.sources import Rows, Source
from featx.errors import ArgumentTypeError, ExtractionError

_TRIED_SAMPLES = 100
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
    def of(source: Source, reader: Reader, job: Job | None) -> FirstSample:
        """Read the first sample that can be read, or the one that the job of the folder has read.

        Raises:
            ExtractionError: none of the first samples can be read.
        """
        seen = None if job is None else str(job.identity.get("sample", "")).partition(" ")[0]
        numbers = [int(seen)] if seen and int(seen) < len(source.keys) else range(min(len(source.keys), _TRIED_SAMPLES))
        reasons: list[str] = []
        for number in numbers:
            try:
                value, again = (as_input(reader(source.item(number))) for _ in range(2))
            except ArgumentTypeError:
                raise
            except Exception as error:  # whatever a file or a function of the user's leads to
                reasons.append(f"'{source.keys[number]}': {reason_of(error)}")
                continue
            hashes = {fingerprint(value), fingerprint(again)}
            if len(hashes) > 1:
                return FirstSample(value, f"{number} {DIFFERS}")
            return FirstSample(value, " ".join([str(number), hashes.pop(), *_hashes_of_others(source, reader)]))
        is_array = "ndarray" in source.kind
        hint = ". The transform is given arrays; if it is for PIL images, give a list of these" if is_array else ""
        raise ExtractionError(
            f"none of the first {len(reasons)} samples of {source.kind} can be read: {reasons[0]}{hint}"
        )


def _hashes_of_others(source: Source, reader: Reader) -> Iterator[str]:
    """Yield hashes of some inputs of a source whose keys are numbers alone, so that another one has the same keys."""
    if not isinstance(source, Rows):
        return
    count = len(source.keys)
    for number in sorted({count * part // _OTHER_SAMPLES for part in range(1, _OTHER_SAMPLES)} | {count - 1}):
        try:
            yield fingerprint(as_input(reader(source.item(number))))
        except Exception as error:  # it will be a failure
            yield type(error).__name__
