"""Run featx and its peers on small models, and print what each can do, as tables in Markdown.

    python benchmarks/peers.py --output docs/comparison.md
    python benchmarks/peers.py --library featx --row attention --errors     one cell, with the error behind a "no"

Each library has a process of its own: what one leaves behind in torch or in a model does not reach the others.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import statistics
import subprocess
import sys
import textwrap
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import timm
import torch
import torchvision
from peers_hooks import Captum, Nnsight, Surgeon, Torchextractor, Torchinfo, Torchlens
from peers_libraries import Extractor, Featx, Library, No, Timm, Torchvision
from peers_rows import ROWS, check, hooked
from torch import nn

LIBRARIES: list[Library] = [
    Featx(), Torchvision(), Timm(), Torchextractor(), Surgeon(), Torchlens(), Nnsight(), Captum(), Torchinfo()
]  # fmt: skip
_RANKS = ("no", "n/a", "by hand", "partly", "yes")
_ABOUT = """\
# featx and its peers

Written by `benchmarks/peers.py`; do not edit. Made on the CPU with
{versions}.

Each cell is what a run gave. *Yes* means that the values equal, bit for bit, those of forward hooks with a copy on
the plain model. *By hand* means that the library has no interface for it, and that a few lines of code beside it do
it. Attention probabilities are compared within rounding; of patterns the number of values, and of maps at strides
their strides and sizes. *No* has the class of the error, or what was found instead. timm offers this for its own
models; there its column is about these. torchinfo makes a summary, without values. surgeon is surgeon-pytorch: its
`Inspect` runs the model with hooks, its `Extract` cuts a graph of torch.fx, and a cell is that of the better one.
Each library ran in a process of its own.
"""


_TIMES = """\
## Times

In ms of process CPU time, with one thread and without gradients, on one image of 224 x 224 pixels: medians, interleaved
in one process. Each library was used once before. Creation includes copies of the model where the library makes them.
After block 5 torchlens and nnsight stop, by `halt=` and `tracer.stop()`. surgeon is `Inspect`. torchlens comes last in
each round, and its wrappers of torch's functions are taken off after it, because they slow down the others. A dash
means that the library does not give these values."""


def cell(row: Callable[[Library], str], library: Library, *, shows_errors: bool = False) -> str:
    """Run an attempt, and return its cell: the better one where a library has two interfaces."""
    try:
        found = row(library)
    except No as reason:
        found = f"no: {reason}" if str(reason) else "no"
    except Exception as error:
        if shows_errors:
            traceback.print_exc()
        found = f"no: {type(error).__name__}"
    if library.other is None or _rank(found) == _RANKS.index("yes"):
        return found
    other = cell(row, library.other, shows_errors=shows_errors)
    if _rank(other) <= _rank(found):
        return found
    word, _, rest = other.partition(": ")
    return f"{word}: {library.other.name}" + (f", {rest}" if rest else "")


def _rank(found: str) -> int:
    return _RANKS.index(found.partition(":")[0])


# -- times -----------------------------------------------------------------------------------------------------------


def times(libraries: list[Library], rounds: int) -> list[list[str]]:
    """Return rows of creation and call times, in ms of process CPU time: medians, interleaved."""
    torch.manual_seed(0)
    cases: list[tuple[str, nn.Module, list[str]]] = [
        (
            "resnet50, layer2 to layer4",
            torchvision.models.resnet50(weights=None).eval(),
            ["layer2", "layer3", "layer4"],
        ),
        ("vit_small_patch16_224, blocks.5", timm.create_model("vit_small_patch16_224").eval(), ["blocks.5"]),
    ]
    rows = []
    for name, model, names in cases:
        x = torch.rand(1, 3, 224, 224)
        able: dict[str, Library] = {}
        for library in libraries:
            try:
                check(_extractor(library, copy.deepcopy(model), names, x)(x), hooked(model, names, x))
                able[library.name] = library
            except Exception:
                continue
        if "torchlens" in able:
            able["torchlens"] = able.pop("torchlens")
        made: dict[str, list[float]] = {each: [] for each in able}
        called: dict[str, list[float]] = {each: [] for each in ["the model", *able]}
        for _ in range(rounds):
            for each, library in able.items():
                own = copy.deepcopy(model)
                extractor, spent = _timed(partial(_extractor, library, own, names, x))
                made[each].append(spent)
                extractor(x)
                called[each].append(_timed(partial(extractor, x))[1])
                del extractor
                if library.name == "torchlens":
                    from torchlens.backends.torch.wrappers import unwrap_torch

                    unwrap_torch()
            called["the model"].append(_timed(partial(model, x))[1])
        for kind, found in (("creation", made), ("call", called)):
            medians = {each: f"{statistics.median(values) * 1e3:.1f}" for each, values in found.items()}
            rows.append([f"{name}: {kind}", *(medians.get(each, "-") for each in ["the model", *_names(libraries)])])
    return rows


def _extractor(library: Library, model: nn.Module, names: list[str], x: torch.Tensor) -> Extractor:
    return library.cut(model, names[0], x).value if len(names) == 1 else library.extract(model, names, x)


def _timed(run: Callable[[], Any]) -> tuple[Any, float]:
    gc.collect()
    with torch.no_grad():
        start = time.process_time()
        result = run()
        return result, time.process_time() - start


def _names(libraries: list[Library]) -> list[str]:
    return [library.name for library in libraries]


# -- the page --------------------------------------------------------------------------------------------------------


def table(headings: list[str], rows: list[list[str]]) -> Iterator[str]:
    """Yield the lines of a table in Markdown."""
    yield "| " + " | ".join(headings) + " |"
    yield "|" + " --- |" * len(headings)
    for row in rows:
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"


def cells(library: Library, rows: list[str]) -> list[str]:
    """Return the cells of a library, from a process of its own."""
    command = [sys.executable, __file__, "--cells", "--library", library.name]
    command += [part for row in rows for part in ("--row", row)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=900, env={**os.environ})
    if ran.returncode:
        raise RuntimeError(f"{library.name}: {ran.stderr[-2000:]}")
    return json.loads(ran.stdout.splitlines()[-1])


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="a file to write the page to")
    parser.add_argument("--library", action="append", help="only these")
    parser.add_argument("--row", action="append", help="only the rows of these functions", default=[])
    parser.add_argument("--rounds", type=int, default=7, help="of the times; 0 for none")
    parser.add_argument("--errors", action="store_true", help="print the errors behind the cells of one library")
    parser.add_argument("--cells", action="store_true", help="print the cells of one library as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    chosen = [each for each in LIBRARIES if not options.library or each.name in options.library]
    rows = [row for row in ROWS if not options.row or row.__name__ in options.row]
    if options.cells or options.errors:
        print(json.dumps([cell(row, chosen[0], shows_errors=options.errors) for row in rows]))
        return
    found = {library.name: library.version() for library in chosen}
    usable = [library for library in chosen if found[library.name]]
    columns = [cells(library, options.row) for library in usable]
    lines = [[str(row.__doc__).strip().rstrip("."), *line] for row, *line in zip(rows, *columns, strict=True)]
    versions = [
        f"Python {sys.version.split()[0]}",
        f"torch {torch.__version__}",
        f"transformers {version('transformers')}",
    ]
    versions += [f"{library.package} {found[library.name]}" for library in usable]
    page = [_ABOUT.format(versions=textwrap.fill(", ".join(versions), 118)), *table(["", *_names(usable)], lines)]
    page += [f"\nNot installed: {each.name} (`pip install {each.package}`)." for each in chosen if each not in usable]
    if options.rounds and not options.row:
        timed = [each for library in usable for each in (library, library.other) if each is not None]
        page += [
            "",
            *_TIMES.splitlines(),
            "",
            *table(["", "the model", *_names(timed)], times(timed, options.rounds)),
        ]
    print("\n".join(page))
    if options.output:
        options.output.write_text("\n".join(page) + "\n")


if __name__ == "__main__":
    main()
