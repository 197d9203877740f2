"""Compare featx with torchvision's extractor on every torchvision and timm model, and write docs/parity.md.

    python benchmarks/parity.py                                   what is not in the results yet, of everything
    python benchmarks/parity.py --what names --library timm --filter '^vit_'
    python benchmarks/parity.py --what values --one-per-family    the smallest model of each family (run names first)
    python benchmarks/parity.py --again bad                       also what was not right the last time
    python benchmarks/parity.py --report                          only write the report

Every result is appended to a file when it is there, so a sweep can be stopped and goes on where it was.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from typing import cast

from models import LIBRARIES, Library, family_of, list_names
from parity_records import Check, Record, Task, load
from parity_report import write_report
from parity_workers import PARITY
from sweep import parser_of, sweep

_CHECKS: tuple[Check, ...] = ("names", "values", "meanings")
# A worker for values is replaced often: memory that large models leave in pieces is not given back.
_MODELS_OF_ONE_WORKER: dict[Check, int] = {"names": 100, "values": 10, "meanings": 10}


def main() -> None:
    """Run what the command line asks for."""
    options = parser_of(cast(str, __doc__), "parity", _CHECKS, LIBRARIES, seconds=600, memory=16).parse_args()
    records = load(options.results)
    if not options.report:
        for check in _CHECKS:
            if options.what in (check, "all"):
                tasks = _tasks(check, options, records)
                models = _MODELS_OF_ONE_WORKER[check]
                sweep(tasks, options, records, models, PARITY, lambda record: record.is_good, _in_short)
    write_report(records.values(), options.output)
    print(f"wrote {options.output}")


def _tasks(check: Check, options: argparse.Namespace, records: dict[Task, Record]) -> Iterator[Task]:
    for library in LIBRARIES:
        if options.library not in (library, "all"):
            continue
        names = [name for name in list_names(library) if re.search(options.filter, name)]
        if options.models:
            names = [name for name in names if name in options.models]
        if options.one_per_family:
            names = _smallest_of_each_family(library, names, records)
        for name in names:
            yield Task(check, library, name)


def _smallest_of_each_family(library: Library, names: list[str], records: dict[Task, Record]) -> list[str]:
    """Return one name for each family: of those that torchvision traces, if any, the one with the fewest parameters."""
    smallest: dict[str, tuple[bool, int, str]] = {}
    for name in names:
        record = records.get(Task("names", library, name))
        rank = (True, 0, name) if record is None else (not record.modes, record.parameters, name)
        family = family_of(library, name)
        smallest[family] = min(smallest.get(family, rank), rank)
    return [name for _, _, name in smallest.values()]


def _in_short(record: Record) -> str:
    if record.problem:
        return record.problem
    if record.modes:
        return ", ".join(f"{mode} {outcome.status}" for mode, outcome in record.modes.items())
    return f"torchvision: {record.torchvision[:80]}, featx: {record.featx[:80]}"


if __name__ == "__main__":
    main()
