"""Compare `featx.create_backbone` with what timm and transformers have for it, and write docs/backbones.md.

    python benchmarks/backbones.py --jobs 2
    python benchmarks/backbones.py --filter '^resnet' --one-per-family
    python benchmarks/backbones.py --report                         only write the report

Every result is appended to a file when it is there, so a sweep can be stopped and goes on where it was.
"""

from __future__ import annotations

import argparse
import gzip
import inspect
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import backbones_transformers
import models
import timm
import torch
from models import build, input_shapes, list_names, make_input, seeded
from parity_records import EQUAL, TRACED, Library, Outcome, Record, Task, load, message_of, states
from parity_report import Table
from parity_values import is_out_of_memory
from parity_workers import Check, Job
from sweep import parser_of, sweep
from torch import nn

import featx

_COVERAGE = Path(__file__).resolve().parent / "results" / "coverage.jsonl.gz"
_MODELS_OF_ONE_WORKER = 20
_COMPARISONS = {"timm": ("features_only", "forward_intermediates"), "transformers": backbones_transformers.COMPARISONS}
_LARGE = 150_000_000
_LARGEST = 2_500_000_000
_BLOCK = 1_000_003
_DIFFERENT = "different"
_NOT_COMPARABLE = "not comparable"
_ABOUT = """\
# Backbones of timm's and transformers' models

Written by `benchmarks/backbones.py`; do not edit. Made with featx {featx}, torch {torch}, timm {timm} and
transformers {transformers}, without pretrained weights, in eval mode.

For each model of timm, `featx.create_backbone` of the plain model is compared with what timm itself offers: the module
that `timm.create_model(..., features_only=True)` returns, given the same weights, with its maps, channels and
reductions (by `strides` where they differ from each other, else by `blocks`), and the maps that the model's
`forward_intermediates` returns, all of them, by `blocks`. Maps are NCHW, and equal means equal bit for bit. Weights and
images are random, two images at once, and one for models of 150 million parameters and more; those of over 2.5 billion
run in bfloat16.

For each type of model of which transformers' `AutoBackbone` makes a backbone, `featx.create_backbone` of that module is
compared with its `feature_maps` (*AutoBackbone*), and so is that of the plain model which `AutoModel` makes, with the
same weights, where transformers has one (*AutoModel*). AutoBackbone's modules may put a norm of their own, or the final
norm of the model, after a map, and the plain model has none there. So they run without it for the second comparison.

| comparison | models | equal | different | not comparable |
| --- | --- | --- | --- | --- |
{counts}

{checked} of timm's {all} models and {types} of transformers' {all_types} types were compared. Below is each one that
is not equal in both, with the reason.
"""


def main() -> None:
    """Run what the command line asks for."""
    parser = parser_of(cast(str, __doc__), "backbones", ["backbone"], ["timm", "transformers"], seconds=400, memory=16)
    options = parser.parse_args()
    records = load(options.results)
    if not options.report:
        job = Job(_family_of, _start)
        known = {**_of_other_sweeps(), **records}  # small models first
        sweep(_tasks(options), options, known, _MODELS_OF_ONE_WORKER, job, lambda each: each.is_good, _in_short)
        records = load(options.results)
    _write_report(list(records.values()), options.output)
    print(f"wrote {options.output}")


def _of_other_sweeps() -> dict[Task, Record]:
    with gzip.open(_COVERAGE, "rt") as lines:
        found = (json.loads(line) for line in lines)
        records = (
            Record(each["check"], each["library"], each["model"], parameters=each["parameters"]) for each in found
        )
        return {record.task: record for record in records}


def _tasks(options: argparse.Namespace) -> list[Task]:
    listed: list[tuple[Library, str]] = [("timm", name) for name in list_names("timm")]
    listed += [("transformers", name) for name in backbones_transformers.list_types()]
    listed = [each for each in listed if options.library in (each[0], "all") and re.search(options.filter, each[1])]
    listed = [each for each in listed if not options.models or each[1] in options.models]
    if options.one_per_family:
        by_family: dict[str, list[tuple[Library, str]]] = {}
        for library, name in listed:
            by_family.setdefault(_family_of(library, name), []).append((library, name))
        listed = [min(group, key=_size_of) for group in by_family.values()]
    return [Task("backbone", library, name) for library, name in listed]


def _size_of(task: tuple[Library, str]) -> int:
    return _size(task[1]) if task[0] == "timm" else 0


def _size(name: str) -> int:
    return sum(parameter.numel() for parameter in models.build_without_weights("timm", name).parameters())


def _in_short(record: Record) -> str:
    return record.problem or ", ".join(f"{name} {each.status} {each.detail}" for name, each in record.modes.items())


def _family_of(library: str, name: str) -> str:
    return models.family_of("timm", name) if library == "timm" else name


def _start(folder: Path) -> Check:
    return check


def check(record: Record) -> None:
    """Fill in whether the backbone of a model is what its library has for it."""
    if record.library == "transformers":
        backbones_transformers.fill_in(record, _outcome, _compared)
    else:
        _check_timm(record)


def _check_timm(record: Record) -> None:
    size = _size(record.model)
    dtype = torch.bfloat16 if size > _LARGEST else torch.float32
    with _fast_weights(), models.floats_of(dtype):
        model = build("timm", record.model).eval()
    record.parameters = size
    with _fast_weights(draw=False), torch.device("meta" if size > _LARGE else "cpu"):
        net = timm.create_model(record.model, pretrained=False, features_only=True).eval()
    lacking = _share_weights(model, net)
    shape, expected = _run(model, net)
    record.pixels = shape[-1]
    record.featx = TRACED
    image = _image(model, shape)
    if lacking:
        # What features_only builds besides the model.
        record.modes["features_only"] = Outcome(_NOT_COMPARABLE, f"has parameters of its own: {', '.join(lacking[:3])}")
    else:
        record.modes["features_only"] = _outcome(lambda: _as_features_only(model, net, image, expected))
    record.modes["forward_intermediates"] = _outcome(lambda: _as_intermediates(model, image))


@contextmanager
def _fast_weights(*, draw: bool = True) -> Generator[None, None, None]:
    """Let initialization inside copy random values from one block, or with `draw=False` zeros.

    Drawing them anew takes longer than all else for large models.
    """
    block = torch.rand(_BLOCK, generator=torch.Generator().manual_seed(0))

    def fill(tensor: torch.Tensor, low: float, high: float) -> torch.Tensor:
        if not draw:
            tensor.detach().zero_()  # what memory holds may be outside of the bounds within which trunc_normal_ draws
        elif not tensor.is_meta:
            values = block * (high - low) + low
            for part in tensor.detach().view(-1).split(_BLOCK):
                part.copy_(values[: part.numel()])
        return tensor

    def uniform_(self: torch.Tensor, a: float = 0, b: float = 1, *, generator: object = None) -> torch.Tensor:
        return fill(self, a, b)

    def normal_(self: torch.Tensor, mean: float = 0, std: float = 1, *, generator: object = None) -> torch.Tensor:
        return fill(self, mean - std, mean + std)

    def erfinv_(self: torch.Tensor) -> torch.Tensor:
        return self  # trunc_normal_ calls it after uniform_; without it, the values stay uniform

    with ExitStack() as patches:
        for method in (uniform_, normal_, erfinv_):
            patches.enter_context(patch.object(torch.Tensor, method.__name__, method))
        yield


def _image(model: nn.Module, shape: tuple[int, ...]) -> torch.Tensor:
    parameters = list(model.parameters())
    batch = 2 if sum(each.numel() for each in parameters) < _LARGE else 1
    return make_input(shape, batch).to(parameters[0].dtype)


def _share_weights(model: nn.Module, net: nn.Module) -> list[str]:
    """Give `net` the weights of `model`, and return the names of those that the model lacks."""
    state = {_plain(name): tensor for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    found = [name for name, _ in (*net.named_parameters(), *net.named_buffers())]
    # Some of timm's modules have the model inside them as `model` or `body`.
    own = {
        name: next((each for each in (_plain(name), *_without_first(name)) if each in state), None) for name in found
    }
    lacking = [name for name, other in own.items() if other is None]
    if not lacking:
        for name in found:
            parent, _, last = name.rpartition(".")
            setattr(net.get_submodule(parent), last, state[str(own[name])])
    return lacking


def _without_first(name: str) -> list[str]:
    return [_plain(name.removeprefix(f"{first}.")) for first in ("model", "body") if name.startswith(f"{first}.")]


def _plain(name: str) -> str:
    return name.replace(".", "_")


def _run(model: nn.Module, net: nn.Module) -> tuple[tuple[int, ...], Any]:
    error: Exception | None = None
    for shape in input_shapes("timm", "", model):
        try:
            with torch.no_grad(), seeded():
                return shape, net(_image(model, shape))
        except Exception as caught:  # whatever a model raises for a size that it does not take
            error = caught
    raise RuntimeError(f"the model runs on no image: {error}")


def _outcome(compare: Callable[[], str]) -> Outcome:
    try:
        difference = compare()
    except Exception as error:  # whatever is raised is what the comparison found
        if is_out_of_memory(error):
            raise
        return Outcome(_DIFFERENT, message_of(error))
    return Outcome(_DIFFERENT, difference) if difference else Outcome(EQUAL)


def _as_features_only(model: nn.Module, net: Any, image: torch.Tensor, expected: Any) -> str:
    info = net.feature_info
    reductions, channels = info.reduction(), info.channels()
    if len(set(reductions)) == len(reductions) > 1:
        backbone = featx.create_backbone(model, strides=reductions, example_inputs=image)
    else:
        backbone = featx.create_backbone(model, blocks=list(info.out_indices), example_inputs=image)
    if backbone.channels != channels or backbone.strides != reductions:
        return f"channels {backbone.channels} and strides {backbone.strides}, timm's {channels} and {reductions}"
    return _compared(backbone, image, [_as_nchw(each, size) for each, size in zip(expected, channels, strict=True)])


def _as_intermediates(model: Any, image: torch.Tensor) -> str:
    with torch.no_grad(), seeded():
        # Hiera returns each block unless it is asked for stages, which is what its feature_info has.
        can_be_coarse = "coarse" in inspect.signature(model.forward_intermediates).parameters
        options = {"coarse": True} if can_be_coarse else {}
        expected = model.forward_intermediates(image, intermediates_only=True, output_fmt="NCHW", **options)
    backbone = featx.create_backbone(model, blocks=list(range(len(expected))), example_inputs=image)
    return _compared(backbone, image, expected)


def _compared(backbone: nn.Module, image: torch.Tensor, expected: Sequence[torch.Tensor]) -> str:
    with torch.no_grad(), seeded():
        maps = list(backbone(image).values())
    for place, (found, theirs) in enumerate(zip(maps, expected, strict=True)):
        if found.shape != theirs.shape:
            return f"map {place} is {tuple(found.shape)}, expected {tuple(theirs.shape)}"
        if not torch.equal(found, theirs):
            return f"map {place} differs by {float((found - theirs).abs().max()):.2g}"
    return ""


def _as_nchw(value: torch.Tensor, channels: int) -> torch.Tensor:
    """Return a map of timm as NCHW; swin's are NHWC."""
    is_last = value.shape[1] != channels and value.shape[-1] == channels
    return value.permute(0, 3, 1, 2) if is_last else value


def _write_report(records: list[Record], path: Path) -> None:
    counts: list[str] = []
    for name in itertools.chain(*_COMPARISONS.values()):
        found = Counter(each.modes[name].status for each in records if name in each.modes)
        cells = [found[EQUAL], found[_DIFFERENT], found[_NOT_COMPARABLE]]
        counts.append(f"| `{name}` | {sum(cells)} | {' | '.join(map(str, cells))} |")
    done = Counter(each.library for each in records if not each.problem)
    about = _ABOUT.format(
        featx=featx.__version__,
        torch=torch.__version__,
        timm=timm.__version__,
        counts="\n".join(counts),
        transformers=version("transformers"),
        checked=done["timm"],
        all=len(list_names("timm")),
        types=done["transformers"],
        all_types=len(backbones_transformers.list_types()),
    )
    table = Table("What is not equal", ["library", "model", "comparison", "what is different"])
    for record in sorted(records, key=lambda each: (each.library, each.model)):
        if record.problem:
            table.add(record.library, record.model, "-", record.problem)
        for name, outcome in record.modes.items():
            if outcome.status != EQUAL:
                reason = backbones_transformers.REASONS.get((record.model, name), outcome.detail or outcome.status)
                table.add(record.library, record.model, f"`{name}`", reason)
    stale = "" if len(states(records)) < 2 else "\nThe results come from several states of featx's source.\n"
    path.write_text(f"{about}{stale}\n{table.text()}")


if __name__ == "__main__":
    main()
