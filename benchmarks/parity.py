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
from pathlib import Path
from typing import cast

from models import LIBRARIES, Library, family_of, list_names
from parity_records import Check, Record, Task, append, load, source_of_featx
from parity_report import write_report
from parity_workers import Limits, run_all

_ROOT = Path(__file__).resolve().parent.parent
_CHECKS: tuple[Check, ...] = ("names", "values")
# A worker for values is replaced often: memory that large models leave in pieces is not given back.
_MODELS_OF_ONE_WORKER: dict[Check, int] = {"names": 100, "values": 10}


def main() -> None:
    """Run what the command line asks for."""
    options = _parser().parse_args()
    results: Path = options.results
    records = load(results)
    if not options.report:
        for check in _CHECKS:
            if options.what in (check, "all"):
                _sweep(check, options, records)
    write_report(records.values(), options.output)
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
        print(f"{done}/{len(tasks)} {check} {record.library} {record.model}: {_in_short(record)}", flush=True)

    run_all(tasks, options.jobs, limits, options.results.parent, keep)


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


def _is_due(record: Record | None, again: str, source: str) -> bool:
    if record is None or again == "all":
        return True
    if again == "bad":
        return not record.is_good
    return again == "stale" and record.source != source


def _in_short(record: Record) -> str:
    if record.problem:
        return record.problem
    if record.modes:
        return ", ".join(f"{mode} {outcome.status}" for mode, outcome in record.modes.items())
    return f"torchvision: {record.torchvision[:80]}, featx: {record.featx[:80]}"


def _parser() -> argparse.ArgumentParser:
    summary = cast(str, __doc__)
    parser = argparse.ArgumentParser(description=summary, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", choices=[*_CHECKS, "all"], default="all")
    parser.add_argument("--library", choices=[*LIBRARIES, "all"], default="all")
    parser.add_argument("--filter", default="", help="a regular expression that occurs in the names of models")
    parser.add_argument("--models", nargs="+", default=[], help="names of models")
    parser.add_argument("--one-per-family", action="store_true", help="only the smallest model of each family")
    again = "which results to replace: what was not right, or made by another state of featx"
    parser.add_argument("--again", choices=["nothing", "bad", "stale", "all"], default="nothing", help=again)
    parser.add_argument("--jobs", type=int, default=1, help="worker processes, of one thread each")
    parser.add_argument("--seconds", type=float, default=600, help="limit for one model")
    parser.add_argument("--memory", type=float, default=16, help="limit for one worker, in GiB")
    parser.add_argument("--results", type=Path, default=_ROOT / "output" / "parity" / "results.jsonl")
    parser.add_argument("--output", type=Path, default=_ROOT / "docs" / "parity.md", help="the report")
    parser.add_argument("--report", action="store_true", help="only write the report")
    return parser


if __name__ == "__main__":
    main()
