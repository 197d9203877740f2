"""Turn the records of the parity sweep into docs/parity.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import timm
import torch
import torchvision
from models import LIBRARIES, Library, family_of, list_names
from parity_records import EQUAL, MEANT, MODES, TRACED, Mode, Outcome, Record, states

import featx

_ABOUT = """\
# Parity with torchvision's extractor

Written by `benchmarks/parity.py`; do not edit. Made with featx {featx}, torch {torch}, torchvision {torchvision} and
timm {timm}, for all models that torchvision and timm list, without pretrained weights.

*Traced* means that `get_graph_node_names` returns, which it does for both modes or for none. *Names equal* means the
same names in the same order as torchvision's. *As meant* are differences where torchvision's name is wrong: it takes a
number at the end of a real name (`ln_1`, `gamma_1`) for its own numbering, or gives the name of a module to a function.
*Values equal* means that what extractors return is, bit for bit, what a forward hook (with a clone) sees on the
untouched model, or what the model returns: for a call in the middle, alone and together with the others; a module in
the middle that is not a leaf; the last module call; and the last node, where it is in the output. Batch 1 in eval mode,
batch 2 in train mode, the model's own initialization and input size (or 160 pixels a side where it takes them), one
seed. Models of over 400 million parameters are made for 112 pixels where they can be, and those of over 2.5 billion run
in bfloat16. *Values not run* are models that featx traces and that were not compared; the sweep can be narrowed, and
what was too large or too slow is listed. Names and values are those of the symbolic tracer, as torchvision's are.

*Meanings equal* is about what users call: with the default tracer, which follows an example, every name that both list
has, bit for bit, the value that it has in torchvision's own graph. Names of torchvision alone raise `NodeNameError`.
The differences that are left come from numbers: torchvision has a node each time that a length is taken out of a size
(`img_size = x.shape[1:3]`, and `h, w = img_size` later, in MaxViT), for reads of ranks and dtypes (`getattr` in
EvoNorm, FRN and rotary positions), and for arithmetic on sizes of parameters and on ranks (`(1,) * (x.ndim - 1)` in
timm's `drop_path`). featx has one node for each length, and constants. Names such as `getitem_5`, `bn1.getattr`,
`pos_embed.add_2` or `drop_path1.mul` count something else in these models.
"""

_COUNTS = (
    "models",
    "traced by torchvision",
    "traced by featx",
    "by torchvision alone",
    "names equal",
    "names as meant",
    "names unexplained",
    "values equal",
    "values different",
    "values not run",
)
_UNEXPLAINED = ("unexplained",)
_WRONG = ("different", "extractor fails")
_NOT_COMPARED = ("model fails", "not comparable")
_NOT_RUN = "not run"
# A model has the last of these that it has in a mode.
_ORDER = (EQUAL, MEANT, *_NOT_COMPARED, _NOT_RUN, *_UNEXPLAINED, *_WRONG)


@dataclass
class _Model:
    """What was found about one model."""

    library: Library
    name: str
    names: Record | None
    values: Record | None

    @property
    def family(self) -> str:
        return family_of(self.library, self.name)

    @property
    def is_traced_by_torchvision(self) -> bool:
        return self.names is not None and self.names.torchvision == TRACED

    @property
    def is_traced_by_featx(self) -> bool:
        return self.names is not None and self.names.featx == TRACED


def write_report(records: Iterable[Record], path: Path) -> None:
    """Write the report on `records` to `path`."""
    found = {(record.check, record.library, record.model): record for record in records}
    models = [
        _Model(library, name, found.get(("names", library, name)), found.get(("values", library, name)))
        for library in LIBRARIES
        for name in list_names(library)
    ]
    about = _ABOUT.format(
        featx=featx.__version__, torch=torch.__version__, torchvision=torchvision.__version__, timm=timm.__version__
    )
    if len(states(found.values())) > 1:
        about += "\nThe results come from several states of featx's source; `--again stale` renews the older ones.\n"
    meanings = [record for record in found.values() if record.check == "meanings"]
    sections = [about, _summary(models), _meanings(meanings), _families(models), *_traces(models)]
    sections += _differences(models, meanings)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(sections))


def _summary(models: list[_Model]) -> str:
    table = Table("Summary", ["library", "mode", *_COUNTS])
    for library in LIBRARIES:
        part = [model for model in models if model.library == library]
        for mode in MODES:
            table.add(library, mode, *_counts(part, (mode,)))
    return table.text()


def _meanings(records: list[Record]) -> str:
    columns = [
        "library",
        "mode",
        "models compared",
        "meanings equal",
        "as meant",
        "different",
        "extractor fails",
        "not comparable",
    ]
    table = Table("What names mean with the default tracer", columns)
    for library in LIBRARIES:
        for mode in MODES:
            found = Counter(
                each.modes[mode].status for each in records if each.library == library and mode in each.modes
            )
            counts = [found[status] for status in (EQUAL, MEANT, "different", "extractor fails", "not comparable")]
            table.add(library, mode, sum(found.values()), *counts)
    return table.text()


def _families(models: list[_Model]) -> str:
    table = Table("Families", ["library", "family", *_COUNTS], "A model counts as equal if it is in both modes.")
    groups: dict[tuple[Library, str], list[_Model]] = {}
    for model in models:
        groups.setdefault((model.library, model.family), []).append(model)
    for (library, family), group in sorted(groups.items()):
        table.add(library, family, *_counts(group, MODES))
    return table.text()


def _counts(models: list[_Model], modes: Iterable[Mode]) -> list[int]:
    """Return the numbers under `_COUNTS`; a model's status is its worst in `modes`."""
    names = Counter(_worst(model.names, modes) for model in models)
    values = Counter(_worst(model.values, modes) for model in models)
    traced = sum(model.is_traced_by_featx for model in models)
    different = sum(values[status] for status in _WRONG)
    return [
        len(models),
        sum(model.is_traced_by_torchvision for model in models),
        traced,
        sum(model.is_traced_by_torchvision and not model.is_traced_by_featx for model in models),
        names[EQUAL],
        names[MEANT],
        names["unexplained"],
        values[EQUAL],
        different,
        traced - values[EQUAL] - different,
    ]


def _worst(record: Record | None, modes: Iterable[Mode]) -> str:
    if record is None:
        return _NOT_RUN
    return max((record.modes[mode].status if mode in record.modes else _NOT_RUN for mode in modes), key=_ORDER.index)


def _traces(models: list[_Model]) -> list[str]:
    lost = Table("Traced by torchvision, not by featx", ["library", "model", "why"])
    gained = Table("Traced by featx, not by torchvision", ["library", "model", "torchvision"])
    neither = Table("Traced by neither", ["library", "model", "why"])
    not_checked = Table("Not checked", ["library", "model", "check", "why"])
    for model in models:
        for record in (model.names, model.values):
            if record is not None and record.problem:
                not_checked.add(model.library, model.name, record.check, record.problem)
        if model.names is None or model.names.problem:
            continue
        if not model.is_traced_by_featx:
            table = lost if model.is_traced_by_torchvision else neither
            table.add(model.library, model.name, _without_advice(model.names.featx))
        elif not model.is_traced_by_torchvision:
            gained.add(model.library, model.name, model.names.torchvision)
    return [table.text() for table in (not_checked, lost, gained, neither)]


def _without_advice(error: str) -> str:
    return error.partition(" To go on,")[0]


def _differences(models: list[_Model], meanings: list[Record]) -> list[str]:
    names = [model.names for model in models if model.names is not None]
    values = [model.values for model in models if model.values is not None]
    return [
        _outcomes("Names that differ without a known reason", names, _UNEXPLAINED),
        _outcomes("Values that differ", values, _WRONG),
        _outcomes("Names that mean something else with the default tracer", meanings, _WRONG),
        _outcomes("Values that could not be compared", values, _NOT_COMPARED),
        _outcomes("Meanings that could not be compared", meanings, _NOT_COMPARED),
        _outcomes("Names that differ as meant", names, (MEANT,)),
    ]


def _outcomes(title: str, records: list[Record], statuses: tuple[str, ...]) -> str:
    table = Table(title, ["library", "model", "mode", "what"])
    for record in records:
        found = {mode: outcome for mode, outcome in record.modes.items() if outcome.status in statuses}
        if len(found) == len(MODES) and found["train"] == found["eval"]:
            found = {"both": found["eval"]}
        for mode, outcome in found.items():
            table.add(record.library, record.model, mode, _described(outcome))
    return table.text()


def _described(outcome: Outcome) -> str:
    return f"{outcome.status}: {outcome.detail}" if outcome.status in (*_WRONG, *_NOT_COMPARED) else outcome.detail


@dataclass
class Table:
    """A Markdown table under a heading, or the word None where it has no rows."""

    title: str
    columns: list[str]
    note: str = ""
    rows: list[list[str]] = field(default_factory=lambda: list[list[str]]())

    def add(self, *cells: object) -> None:
        """Append a row."""
        self.rows.append([str(cell).replace("|", "\\|") for cell in cells])

    def text(self) -> str:
        """Return the table as Markdown."""
        heading = f"## {self.title}\n\n" + (f"{self.note}\n\n" if self.note else "")
        if not self.rows:
            return heading + "None.\n"
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        return heading + "".join(f"| {' | '.join(line)} |\n" for line in lines)
