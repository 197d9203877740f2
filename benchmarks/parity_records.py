"""Keep what the parity sweep found as JSON lines, one record for each model and check."""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import models

import featx

Check = Literal["names", "values", "meanings", "exact", "backbone", "gpu"]
Library = models.Library | Literal["transformers"]
Mode = Literal["train", "eval"]
MODES: tuple[Mode, ...] = ("train", "eval")

TRACED = "traced"
EQUAL = "equal"
MEANT = "meant"

_FOLDERS = re.compile(r"/\S*/(site-packages|lib/python[0-9.]+)/")


@dataclass(frozen=True)
class Task:
    """One check of one model."""

    check: Check
    library: Library
    model: str


@dataclass
class Outcome:
    """What a check found in one mode.

    `status` is for names: equal, meant, unexplained. For values: equal, different, extractor fails,
    model fails, not comparable. For coverage: see `coverage_checks`.
    `detail` says what differs and why, or what was compared.
    """

    status: str
    detail: str = ""


@dataclass
class Record:
    """What a check found for one model.

    `problem` is why there is no outcome: too large, too slow, crashed, failed. `torchvision` and `featx` are
    `TRACED`, an error, or empty where the check did not try; `modes` has an outcome for each mode that was compared.
    `source` identifies the state of featx's source that was checked. `note` is what else the report should tell.
    """

    check: Check
    library: Library
    model: str
    family: str = ""
    parameters: int = 0
    pixels: int = 0
    problem: str = ""
    torchvision: str = ""
    featx: str = ""
    modes: dict[str, Outcome] = field(default_factory=lambda: dict[str, Outcome]())
    source: str = ""
    note: str = ""

    @property
    def task(self) -> Task:
        """What was checked."""
        return Task(self.check, self.library, self.model)

    @property
    def is_good(self) -> bool:
        """Whether featx did all that torchvision's extractor does, and right; values do not know what that is."""
        is_missed = self.featx != TRACED and (self.check == "values" or self.torchvision == TRACED)
        if self.problem or is_missed:
            return False
        return all(outcome.status in (EQUAL, MEANT) for outcome in self.modes.values())


def load(path: Path) -> dict[Task, Record]:
    """Return the last record of each task in a file of JSON lines; nothing if there is no file."""
    if not path.exists():
        return {}
    records = (_record(json.loads(line)) for line in path.read_text().splitlines() if line)
    return {record.task: record for record in records}


def append(path: Path, record: Record) -> None:
    """Write one record at the end of a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(asdict(record)) + "\n")


def source_of_featx() -> str:
    """Return a short hash of the syntax of featx's Python files: comments and layout do not count."""
    folder = Path(featx.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(ast.dump(ast.parse(path.read_bytes())).encode())
    return digest.hexdigest()[:12]


def message_of(error: BaseException) -> str:
    """Return the type and message of an error in one line of at most 400 characters, without this machine's folders."""
    text = _FOLDERS.sub("", " ".join(str(error).split()))
    return f"{type(error).__name__}: {text}"[:400]


def states(records: Iterable[Record]) -> set[str]:
    """Return the states of featx's source that records were made with."""
    return {record.source for record in records}


def _record(line: dict[str, Any]) -> Record:
    modes = {mode: Outcome(**outcome) for mode, outcome in line.pop("modes").items()}
    return Record(**line, modes=modes)
