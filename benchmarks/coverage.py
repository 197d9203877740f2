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
from pathlib import Path
from typing import cast

from coverage_checks import JOB, family_of
from coverage_report import is_failure, write_report
from coverage_transformers import list_types
from models import build_without_weights, list_names
from parity_records import Check, Library, Record, Task, append, load, source_of_featx
from parity_workers import Limits, run_all

_ROOT = Path(__file__).resolve().parent.parent
_LIBRARIES: tuple[Library, ...] = ("torchvision", "timm", "transformers")
_CHECKS: tuple[Check, ...] = ("names", "exact")
# Memory that large models leave in pieces is not given back.
_MODELS_OF_ONE_WORKER: dict[Check, int] = {"names": 50, "exact": 8}


def main() -> None:
    """Run what the command line asks for."""
    options = _parser().parse_args()
    records = load(options.results)
    if not options.report:
        for check in _CHECKS:
            if options.what in (check, "all"):
                _sweep(check, options, records)
    write_report(list(records.values()), options.output)
    print(f"wrote {options.output}")


def _sweep(check: Check, options: argparse.Namespace, records: dict[Task, Record]) -> None:
    source = source_of_featx()
    tasks = [task for task in _tasks(check, options, records) if _is_due(records.get(task), options.again, source)]
    limits = Limits(options.seconds, options.memory, _MODELS_OF_ONE_WORKER[check])
    done = 0

    def keep(record: Record) -> None:
        nonlocal done
        done += 1
        append(options.results, record)
        records[record.task] = record
        found = record.problem or ", ".join(f"{size} {outcome.status}" for size, outcome in record.modes.items())
        print(f"{done}/{len(tasks)} {check} {record.library} {record.model}: {found or record.featx}", flush=True)

    run_all(tasks, options.jobs, limits, options.results.parent, keep, JOB)


def _tasks(check: Check, options: argparse.Namespace, records: dict[Task, Record]) -> list[Task]:
    tasks: list[Task] = []
    for library in _LIBRARIES:
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


def _is_due(record: Record | None, again: str, source: str) -> bool:
    if record is None or again == "all":
        return True
    if again == "bad":
        return is_failure(record)
    return again == "stale" and record.source != source


def _parser() -> argparse.ArgumentParser:
    summary = cast(str, __doc__)
    parser = argparse.ArgumentParser(description=summary, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", choices=[*_CHECKS, "all"], default="all")
    parser.add_argument("--library", choices=[*_LIBRARIES, "all"], default="all")
    parser.add_argument("--filter", default="", help="a regular expression that occurs in the names of models")
    parser.add_argument("--models", nargs="+", default=[], help="names of models")
    family = "only the smallest model of each family; in transformers a model is one"
    parser.add_argument("--one-per-family", action="store_true", help=family)
    again = "which results to replace: what was not right, or made by another state of featx"
    parser.add_argument("--again", choices=["nothing", "bad", "stale", "all"], default="nothing", help=again)
    parser.add_argument("--jobs", type=int, default=1, help="worker processes, of one thread each")
    parser.add_argument("--seconds", type=float, default=300, help="limit for one model")
    parser.add_argument("--memory", type=float, default=12, help="limit for one worker, in GiB")
    parser.add_argument("--results", type=Path, default=_ROOT / "output" / "coverage" / "results.jsonl")
    parser.add_argument("--output", type=Path, default=_ROOT / "docs" / "coverage.md", help="the report")
    parser.add_argument("--report", action="store_true", help="only write the report")
    return parser


if __name__ == "__main__":
    main()
