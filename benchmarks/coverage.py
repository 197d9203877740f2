"""Sweep which models featx's example tracer reaches and whether its features are exact, and write docs/coverage.md.

    python benchmarks/coverage.py --library torchvision --what exact --one-per-family
    python benchmarks/coverage.py --library timm --what names
    python benchmarks/coverage.py --library transformers --what exact --filter '^bert'
    python benchmarks/coverage.py --again bad                       also what was not right the last time
    python benchmarks/coverage.py --report                          only write the report

Every result is appended to a file when it is there, so a sweep can be stopped and goes on where it was.
"""

from __future__ import annotations

import argparse
import re
from typing import cast

from coverage_checks import JOB, family_of
from coverage_report import is_failure, write_report
from coverage_transformers import list_types
from models import build_without_weights, list_names
from parity_records import Check, Library, Record, Task, load
from sweep import parser_of, sweep

LIBRARIES_OF_MODELS: tuple[Library, ...] = ("torchvision", "timm", "transformers")
_CHECKS: tuple[Check, ...] = ("names", "exact")
# Memory that large models leave in pieces is not given back.
_MODELS_OF_ONE_WORKER: dict[Check, int] = {"names": 50, "exact": 25}


def main() -> None:
    """Run what the command line asks for."""
    options = parser_of(
        cast(str, __doc__), "coverage", _CHECKS, LIBRARIES_OF_MODELS, seconds=300, memory=12
    ).parse_args()
    records = load(options.results)
    if not options.report:
        for check in _CHECKS:
            if options.what in (check, "all"):
                tasks = tasks_of(check, options, records)
                models = _MODELS_OF_ONE_WORKER[check]
                sweep(tasks, options, records, models, JOB, lambda record: not is_failure(record), _in_short)
    write_report(list(records.values()), options.output)
    print(f"wrote {options.output}")


def tasks_of(check: Check, options: argparse.Namespace, records: dict[Task, Record]) -> list[Task]:
    """Return what the command line asks for."""
    tasks: list[Task] = []
    for library in LIBRARIES_OF_MODELS:
        if options.library not in (library, "all"):
            continue
        names = list_types() if library == "transformers" else list_names(library)
        names = [name for name in names if re.search(options.filter, name)]
        if options.models:
            names = [name for name in names if name in options.models]
        if library != "transformers" and options.one_per_family:
            names = _smallest_of_each_family(library, names, records)
        tasks += [Task(check, library, name) for name in names]
    return tasks


def _smallest_of_each_family(library: Library, names: list[str], records: dict[Task, Record]) -> list[str]:
    families: dict[str, list[str]] = {}
    for name in names:
        families.setdefault(family_of(library, name), []).append(name)

    def size(name: str) -> int:
        known = records.get(Task("names", library, name)) or records.get(Task("exact", library, name))
        if known is not None and known.parameters:
            return known.parameters
        return sum(parameter.numel() for parameter in build_without_weights(library, name).parameters())

    return [min(group, key=size) for group in families.values()]


def _in_short(record: Record) -> str:
    found = record.problem or ", ".join(f"{size} {outcome.status}" for size, outcome in record.modes.items())
    return found or record.featx


if __name__ == "__main__":
    main()
