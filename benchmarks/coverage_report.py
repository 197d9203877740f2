"""Turn the records of the coverage sweep into docs/coverage.md."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import timm
import torch
import torchvision
from coverage_checks import DIFFERENT, FAILS, MODEL_REFUSES, NO_SUCH_SIZE, NOT_COMPARABLE, REFUSED, SIZES, family_of
from coverage_transformers import DOES_NOT_RUN, list_types
from models import list_names
from parity_records import EQUAL, TRACED, Record, states
from parity_report import Table

import featx

_ABOUT = """\
# Which models featx reaches

Written by `benchmarks/coverage.py`; do not edit. Made with featx {featx}, torch {torch}, torchvision {torchvision},
timm {timm} and transformers {transformers}, without pretrained weights, on inputs that featx finds by itself.

*Names* means that `get_graph_node_names(model, tracer="example")` lists the names in both modes. The rest is for eval
mode without gradients, for weights and inputs from a fixed seed, bit for bit: what `featx.trace` returns is compared
with what the model returns, and every name of a module, from an extractor of all names at once, with what a forward
hook sees on a copy of the model. That is done for inputs as traced (two samples), for one sample, and for a smaller
height and width or a shorter text. *Equal* means that all of it is; *refused* that the graph raises
`SpecializationError` instead; *other* that the model takes no such input or does not give the same twice. *Failed* are
different values and other errors, and a refusal of the inputs that were traced. torchvision's detection scales to 160
pixels here, not to 800. Models of timm with more than 60 million parameters, or for images of more than 256 pixels, are
made for images of 112 to 256 pixels, or run on 160, where they can; those of more than 600 million are bfloat16, and
those of more than 2,500 million are compared with the model itself, for want of memory for a copy. Models of
transformers have two layers and small widths; *do not run* are those for which that guess, or the guess of inputs, does
not fit.
"""

_CHECKED = {"names": "names", "exact": "values"}
_COUNTS = ("models", "do not run", "not checked", "names", "no names", "compared")
_BY_SIZE = ("equal", "refused", "other", "failed")
_FAILED = (DIFFERENT, FAILS)
_OTHER = (MODEL_REFUSES, NOT_COMPARABLE, NO_SUCH_SIZE)
_LENGTH = 150
_FOLDER = re.compile(r"/\S*/(?=benchmarks/)")


def is_failure(record: Record) -> bool:
    """Say whether featx did not do what it should, or nobody knows."""
    is_reached = record.featx == TRACED and not record.problem
    return not is_reached or any(_is_failed(size, outcome.status) for size, outcome in record.modes.items())


def _is_failed(size: str, status: str) -> bool:
    return status in _FAILED or (size == SIZES[0] and status == REFUSED)


def write_report(records: list[Record], path: Path) -> None:
    """Write the report on `records` to `path`."""
    import transformers

    about = _ABOUT.format(
        featx=featx.__version__,
        torch=torch.__version__,
        torchvision=torchvision.__version__,
        timm=timm.__version__,
        transformers=transformers.__version__,
    )
    if len(states(records)) > 1:
        about += _about_states(records)
    models = _models(records)
    libraries = sorted({library for library, _ in models})
    summary = _table("Summary", ["library"])
    families = _table("Families", ["library", "family"])
    for library in libraries:
        group = {name: found for (of, name), found in models.items() if of == library}
        summary.add(library, *_counts(list(group.values())))
        by_family: dict[str, list[list[Record]]] = {}
        for name, found in group.items():
            by_family.setdefault(family_of(library, name), []).append(found)
        for family in sorted(by_family):
            families.add(library, family, *_counts(by_family[family]))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([about, summary.text(), families.text(), *_lists(records)]))


def _about_states(records: list[Record]) -> str:
    """Say in how many states of featx's source the results of each check and library were made."""
    by_sweep: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        by_sweep.setdefault((record.library, _CHECKED.get(record.check, record.check)), []).append(record)
    counts = (f"{check} of {library}: {len(states(found))}" for (library, check), found in sorted(by_sweep.items()))
    return (
        "\nIn how many states of featx's source the results were made: "
        + ", ".join(counts)
        + ".\nOlder ones may come from other versions of these libraries; `--again stale` renews them.\n"
    )


def _models(records: list[Record]) -> dict[tuple[str, str], list[Record]]:
    """Return the records of every model that a library has, by library and name."""
    models: dict[tuple[str, str], list[Record]] = {}
    for library in ("timm", "torchvision"):
        models.update({(library, name): [] for name in list_names(library)})
    models.update({("transformers", name): [] for name in list_types()})
    for record in records:
        # Another version of the library may have listed it.
        models.setdefault((record.library, record.model), []).append(record)
    return models


def _table(title: str, columns: list[str]) -> Table:
    by_size = [f"{size}: {status}" for size in SIZES for status in _BY_SIZE]
    return Table(title, [*columns, *_COUNTS, *by_size])


def _counts(models: list[list[Record]]) -> list[int]:
    does_not_run = sum(any(_does_not_run(record) for record in found) for found in models)
    answered = [[record for record in found if record.featx] for found in models]
    named = sum(any(record.featx == TRACED for record in found) for found in answered)
    unnamed = sum(bool(found) for found in answered) - named
    compared = [record for found in answered for record in found if SIZES[0] in record.modes]
    counts = [len(models), does_not_run, len(models) - does_not_run - named - unnamed, named, unnamed, len(compared)]
    for size in SIZES:
        found = Counter(_kind(size, record) for record in compared)
        counts += [found[kind] for kind in _BY_SIZE]
    return counts


def _kind(size: str, record: Record) -> str:
    status = record.modes[size].status if size in record.modes else NO_SUCH_SIZE
    if _is_failed(size, status):
        return "failed"
    return "other" if status in _OTHER else "equal" if status == EQUAL else "refused"


def _does_not_run(record: Record) -> bool:
    return DOES_NOT_RUN in record.problem


def _lists(records: list[Record]) -> list[str]:
    columns = ["library", "model", "why"]
    unnamed = Table("No names", columns)
    failed = Table("Failed", ["library", "model", "inputs", "why"])
    refused = Table("Refused", ["library", "model", "inputs", "why"])
    incomparable = Table("Not the same twice", columns)
    unchecked = Table("Not checked", ["library", "model", "check", "why"])
    uncached = Table("Checked without their cache", columns, "With `use_cache` in the config, which is the default:")
    idle = Table("Do not run", columns, "What is scaled down, or the inputs that are found, do not fit.")
    for record in sorted(records, key=lambda record: (record.library, record.model, record.check)):
        where = (record.library, record.model)
        if _does_not_run(record):
            idle.add(*where, _short(record.problem.partition(DOES_NOT_RUN)[2]))
        elif record.problem:
            unchecked.add(*where, record.check, _short(record.problem))
        elif record.featx != TRACED:
            unnamed.add(*where, _short(record.featx))
        if record.note:
            uncached.add(*where, _short(record.note))
        for size, outcome in record.modes.items():
            if _is_failed(size, outcome.status):
                failed.add(*where, size, _short(f"{outcome.status}: {outcome.detail}"))
            elif outcome.status == REFUSED:
                refused.add(*where, size, _short(outcome.detail.replace("SpecializationError: ", "")))
            elif outcome.status == NOT_COMPARABLE and size == SIZES[0]:
                incomparable.add(*where, _short(outcome.detail))
    return [table.text() for table in (failed, unnamed, uncached, incomparable, unchecked, refused, idle)]


def _short(text: str) -> str:
    return _FOLDER.sub("", text).strip(" :")[:_LENGTH].replace("`", "")
