"""Run the checks of a sweep that are due, and its command line: what the sweeps of parity and of coverage share."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from parity_records import Check, Record, Task, append, source_of_featx
from parity_workers import Job, Limits, run_all

_ROOT = Path(__file__).resolve().parent.parent


def sweep(
    tasks: Iterable[Task],
    options: argparse.Namespace,
    records: dict[Task, Record],
    models_of_one_worker: int,
    job: Job,
    is_good: Callable[[Record], bool],
    in_short: Callable[[Record], str],
) -> None:
    """Do the tasks that `options.again` says are due, small models first, and append each result to the file."""
    source = source_of_featx()
    due = [task for task in tasks if _is_due(records.get(task), options.again, source, is_good)]
    sizes = {(record.library, record.model): record.parameters for record in records.values()}
    due.sort(key=lambda task: sizes.get((task.library, task.model), 0))  # a sweep that is stopped has done most
    done = 0

    def keep(record: Record) -> None:
        nonlocal done
        done += 1
        append(options.results, record)
        records[record.task] = record
        print(f"{done}/{len(due)} {record.check} {record.library} {record.model}: {in_short(record)}", flush=True)

    limits = Limits(options.seconds, options.memory, models_of_one_worker)
    run_all(due, options.jobs, limits, options.results.parent, keep, job)


def parser_of(
    summary: str, name: str, checks: Sequence[Check], libraries: Sequence[str], *, seconds: float, memory: float
) -> argparse.ArgumentParser:
    """Return the command line of the sweep called `name`."""
    parser = argparse.ArgumentParser(description=summary, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", choices=[*checks, "all"], default="all")
    parser.add_argument("--library", choices=[*libraries, "all"], default="all")
    parser.add_argument("--filter", default="", help="a regular expression that occurs in the names of models")
    parser.add_argument("--models", nargs="+", default=[], help="names of models")
    family = "only the smallest model of each family; in transformers a model is one"
    parser.add_argument("--one-per-family", action="store_true", help=family)
    again = "which results to replace: what was not right, or made by another state of featx"
    parser.add_argument("--again", choices=["nothing", "bad", "stale", "all"], default="nothing", help=again)
    parser.add_argument("--jobs", type=int, default=1, help="worker processes, of one thread each")
    parser.add_argument("--seconds", type=float, default=seconds, help="limit for one model")
    parser.add_argument("--memory", type=float, default=memory, help="limit for one worker, in GiB")
    parser.add_argument("--results", type=Path, default=_ROOT / "output" / name / "results.jsonl")
    parser.add_argument("--output", type=Path, default=_ROOT / "docs" / f"{name}.md", help="the report")
    parser.add_argument("--report", action="store_true", help="only write the report")
    return parser


def _is_due(record: Record | None, again: str, source: str, is_good: Callable[[Record], bool]) -> bool:
    if record is None or again == "all":
        return True
    if again == "bad":
        return not is_good(record)
    return again == "stale" and record.source != source
