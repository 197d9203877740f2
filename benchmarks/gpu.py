"""Sweep whether extractors compute on a GPU what models compute there, and write docs/gpu.md.

    python benchmarks/gpu.py --one-per-family --jobs 8
    python benchmarks/gpu.py --library timm --models resnet50 convnext_tiny
    python benchmarks/gpu.py --report

Values of all module calls are compared bit for bit with those of forward hooks, and what a trace returns with what the
model returns. Every result is appended to a file when it is there, so a sweep can be stopped and goes on where it was.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import cast

import torch
from coverage import LIBRARIES_OF_MODELS, tasks_of
from coverage_checks import GPU_WAYS, JOB
from parity_records import EQUAL, Record, load
from sweep import parser_of, sweep

# A process of CUDA takes far more addresses than memory, so the limit is none.
_GIBIBYTES = 1_000_000
_ABOUT = """\
# Extractors on a GPU

Written by `benchmarks/gpu.py`; do not edit. {where}.

One small model of each family of torchvision and timm, and small models of types of transformers, in eval mode.
*Moved*: the trace and the extractor of all names are made on the CPU, and moved to the GPU by `.to("cuda")`. *Made
there*: they are made of a model that is on the GPU. The numbers are of models where all is *equal*: all module calls
that are features, and what the trace returns, are bit for bit what forward hooks see on the model itself on the GPU,
with deterministic kernels of cuDNN. *Refused* is a clear error: the model does something else on a GPU, and a graph
of the CPU says so. Extractors trace again then.

| library | models | {ways} |
|---|---|---|---|---|---|
{table}

{note}

## What is not equal

{others}
"""


def main() -> None:
    """Run what the command line asks for."""
    parser = parser_of(cast(str, __doc__), "gpu", ("gpu",), LIBRARIES_OF_MODELS, seconds=90, memory=_GIBIBYTES)
    parser.add_argument("--where", default="", help="the GPU and the versions, where the report is written elsewhere")
    parser.add_argument("--note", default="", help="what else the report should tell")
    options = parser.parse_args()
    records = load(options.results)
    if not options.report:
        sweep(tasks_of("gpu", options, records), options, records, 50, JOB, _is_good, _in_short)
    options.output.write_text(_page(list(records.values()), options.where or _here(), options.note))
    print(f"wrote {options.output}")


def _is_good(record: Record) -> bool:
    return bool(record.modes) and all(outcome.status == EQUAL for outcome in record.modes.values())


def _in_short(record: Record) -> str:
    return (
        record.problem or ", ".join(f"{way} {outcome.status}" for way, outcome in record.modes.items()) or record.featx
    )


def _in_brief(detail: str) -> str:
    """Return an error without its advice."""
    return re.split(r"\. (?:The graph is valid|To go on|A graph would)", detail.partition(": ")[2])[0][:200]


def _here() -> str:
    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}" if torch.cuda.is_available() else ""


def _page(records: list[Record], where: str, note: str) -> str:
    lines: list[str] = []
    others: list[str] = []
    for library in LIBRARIES_OF_MODELS:
        # A type of transformers that cannot be built here says nothing of featx.
        own = [record for record in records if record.library == library and record.modes]
        equal = Counter(way for record in own for way in GPU_WAYS if record.modes[way].status == EQUAL)
        lines.append(f"| {library} | {len(own)} | {' | '.join(str(equal[way]) for way in GPU_WAYS)} |")
        for record in own:
            others += [
                f"- {library} {record.model}, {way}: {outcome.status}: {_in_brief(outcome.detail)}"
                for way, outcome in record.modes.items()
                if outcome.status != EQUAL
            ]
    shown = "\n".join(others) or "Nothing."
    return _ABOUT.format(where=where, ways=" | ".join(GPU_WAYS), table="\n".join(lines), others=shown, note=note)


if __name__ == "__main__":
    main()
