"""Plan a job: make its extractor, and find what the features depend on, the size of a batch and that of a shard."""

from __future__ import annotations

import copy
import platform
import sys
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from featx.bulk.jobs.batch_size import find_batch_size, seconds_of_sample
from featx.bulk.jobs.compute import Runner, other_dtype
from featx.bulk.jobs.first_sample import FirstSample, Readable
from featx.bulk.jobs.independence import features_of_one, refuse_dependent_rows
from featx.bulk.jobs.job import Job, hash_of_keys, hash_of_weights
from featx.bulk.samples.loading import form_of, joined, reason_of, stacked
from featx.bulk.samples.reading import Reader
from featx.bulk.samples.sources import Source
from featx.bulk.storage.formats import Column, Format, check_columns
from featx.errors import ArgumentTypeError, ExtractionError, FeatxError
from featx.features.adaptive import AdaptiveExtractor
from featx.features.dual import DualGraphModule
from featx.features.extractor import Nodes, create_feature_extractor
from featx.fingerprint import fingerprint_of_code, fingerprint_of_modules
from featx.optimization.build import Extractor
from featx.optimization.hardware import device_of
from featx.tree import tensors_in

# A shard is about so many bytes, and takes about so many seconds, within these numbers of rows. So that folders can be
# listed, there are at most so many shards.
_BYTES_OF_SHARD, _SECONDS_OF_SHARD, _FEWEST_ROWS, _MOST_ROWS, _MOST_SHARDS = 64_000_000, 60.0, 64, 10_000, 100_000
# More numbers than that in one sample are a map.
_LARGEST_VECTOR = 16_384
# For so many samples the model may raise when a job starts; each of them may take as long as a trace.
_TRIED_BY_MODEL = 10
# Under this name the job file keeps the plan of `featx.optimize`.
OPTIMIZATION = "optimization"
# The names under which the job file keeps what a job has noted itself.
RECORDED = frozenset({"batch_size", "device", "versions", OPTIMIZATION})
# Whose versions a job notes, where they are loaded.
_LIBRARIES = ("torchvision", "timm", "transformers", "numpy", "PIL", "featx")


@dataclass(frozen=True)
class JobOptions:
    """What the user chooses of a job; None is found by itself. The names are those of `extract`."""

    format: Format | None
    batch_size: int | None
    rows_per_shard: int | None
    tolerance: float | None

    @property
    def kept(self) -> dict[str, Any]:
        """Those chosen ones that a job cannot change when it goes on."""
        kept = {"format": self.format, "rows_per_shard": self.rows_per_shard}
        return {name: value for name, value in kept.items() if value is not None}


class ModelFailsError(ExtractionError):
    """The model raises for a sample."""


def first_computed(
    samples: Iterable[Readable], model: nn.Module, nodes: Nodes | None, reader: Reader, device: torch.device | None, *,
    check_rows: bool,
) -> tuple[Readable, Extractor, Runner]:  # fmt: skip
    """Return the first sample for which the model does not raise, and the extractor and runner made with it.

    The arguments are those of `make_extractor` and `make_runner`, which raise too.

    Raises:
        ModelFailsError: the model raises for all of them, or for too many; the error is that of the first one.
    """
    failures: list[ModelFailsError] = []
    for sample in samples:
        try:
            extractor = make_extractor(model, nodes, reader, sample.value, device)
            return sample, extractor, make_runner(extractor, reader, sample.value, check_rows=check_rows)
        except ModelFailsError as error:
            failures.append(error)
            if len(failures) == _TRIED_BY_MODEL:
                break
    raise failures[0]


def make_extractor(
    model: nn.Module, nodes: Nodes | None, reader: Reader, value: Any, device: torch.device | None
) -> Extractor:
    """Return the extractor, in eval mode.

    Args:
        model: as for `extract`.
        nodes: as for `extract`.
        reader: has the part of the preprocessing that runs where the model is.
        value: the input of a sample, the example for the trace.
        device: where to compute; another device than the model's gets a copy of the extractor.

    Raises:
        ArgumentTypeError: there are no `nodes`, and `model` is no extractor.
        ModelFailsError: the model raises for the sample.
    """
    if nodes is None:
        if not isinstance(model, (DualGraphModule, AdaptiveExtractor)):
            raise ArgumentTypeError(
                getattr(type(model), "why_not_traced", None)
                or f"nodes=None is for an extractor, and the model is a {type(model).__name__}"
            )
        extractor = model.eval()
    else:
        extractor = _traced(model, nodes, reader.preprocessing.late, stacked([value] * 2))
    return extractor if device in (None, device_of(extractor)) else copy.deepcopy(extractor).to(device)


def make_runner(extractor: Extractor, reader: Reader, value: Any, *, check_rows: bool) -> Runner:
    """Return what runs an extractor where that is, with the columns that it gives for the input of a sample.

    Raises:
        ModelFailsError: the model raises for the sample.
        RequestError: a feature is no tensor, or has no row for each sample; with `check_rows`, a row depends on the
            other samples of a batch, or is another one each time. Without it no sample is run alone, which a batch
            norm without running statistics does not take.
    """
    runner = Runner(extractor, reader.preprocessing.late, device_of(extractor))
    with _told_of_model(stacked([value] * 2)):
        two = runner.first_features(stacked([value] * 2))
    if check_rows:
        runner.set_columns(features_of_one(runner, value), two)
    else:
        runner.fewest = 2
        runner.set_columns(two, runner.features(stacked([value] * 3)), (2, 3))
    check_columns(runner.columns)
    if check_rows:
        refuse_dependent_rows(runner, value, two)
    return runner


def identity_of(
    model: nn.Module,
    extractor: Extractor,
    columns: Sequence[Column],
    source: Source,
    reader: Reader,
    sample: FirstSample,
    tolerance: float | None,
) -> dict[str, Any]:
    """Return all that the features depend on, by name."""
    first = extractor.extractors[0] if isinstance(extractor, AdaptiveExtractor) else extractor
    code, modules = first.code, fingerprint_of_code(first, first.graph)
    if isinstance(extractor, AdaptiveExtractor) or extractor.makes_further_graphs:  # of any part of the model
        modules = f"{modules} {fingerprint_of_modules(model)}"
    identity: dict[str, Any] = {
        "model": type(model).__name__,
        "nodes": {info.key: info.node for info in extractor.feature_info},
        "code": code,
        "modules": modules,
        "weights": hash_of_weights(extractor),
        "columns": [[each.name, list(each.shape), str(each.dtype)] for each in columns],
        "transform": reader.preprocessing.text,
        "decoder": reader.decoder,
        "keys": hash_of_keys(source.keys),
        "sample": sample.text,
    }
    if tolerance is not None:
        identity["tolerance"] = tolerance
    kind = device_of(extractor).type
    if torch.is_autocast_enabled(kind):
        identity["autocast"] = str(torch.get_autocast_dtype(kind))
    return identity


def plan_job(
    identity: Mapping[str, Any],
    samples: int,
    runner: Runner,
    sample: FirstSample,
    options: JobOptions,
    *,
    is_shown: bool,
) -> Job:
    """Return a new job: measure what the user has not chosen.

    Args:
        identity: what the features depend on.
        samples: how many there are.
        runner: computes their features.
        sample: the input with which batches are timed, and others with which an optimization is looked for.
        options: what the user chooses.
        is_shown: whether a search for an optimization shows its progress.

    Raises:
        ExtractionError: a batch of the size that the user has chosen does not fit into memory.
    """
    if options.batch_size is None:
        size, seconds = find_batch_size(runner, sample.value)
    else:
        size, seconds = options.batch_size, _seconds_at(options.batch_size, runner, sample.value)
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for name in _LIBRARIES:
        if name in sys.modules:
            versions[name] = str(getattr(sys.modules[name], "__version__", "unknown"))
    recorded: dict[str, Any] = {"batch_size": size, "device": str(runner.device), "versions": versions}
    if options.tolerance is not None:
        batches = _batches_of_several(runner, sample, size)
        recorded[OPTIMIZATION] = runner.optimization(batches, options.tolerance, is_shown=is_shown)
        seconds *= recorded[OPTIMIZATION]["chosen"]["ratio"]
    rows = options.rows_per_shard or _rows_of_shard(samples, sum(each.bytes for each in runner.columns), seconds)
    return Job(identity, samples, rows, options.format or _format_of(runner.columns), runner.columns, recorded)


def _batches_of_several(runner: Runner, sample: FirstSample, size: int) -> list[Any]:
    """Return batches of `size` samples in which the first one and the others take turns, each of them in one at least.

    Others are left out that make no batch with the first one, or for which the model raises.
    """
    first = stacked([sample.value])
    values = [first]
    for other in sample.others:
        if form_of(other) == form_of(first) and _runs(runner, joined([first, other])):
            values.append(other)
    count = len(values)
    return [
        joined([values[number % count] for number in range(start, start + size)]) for start in range(0, count, size)
    ]


def _runs(runner: Runner, batch: Any) -> bool:
    try:
        runner.features(batch)
    except Exception:  # the model's own
        return False
    return True


def _seconds_at(size: int, runner: Runner, example: Any) -> float:
    try:
        return seconds_of_sample(runner, example, size)
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise ExtractionError(
            f"{size} samples at once do not fit into the memory of {runner.device}: {error}. Give a smaller "
            "batch_size, or none, and one that fits is found"
        ) from error
    except FeatxError:
        raise
    except Exception as error:  # the model's own
        raise ExtractionError(
            f"the model fails on a batch of {size}: {reason_of(error)}. Give another batch_size, or "
            "none, and one is found"
        ) from error


def _traced(
    model: nn.Module, nodes: Nodes, late: Callable[[torch.Tensor], torch.Tensor], example: Any
) -> DualGraphModule:
    inputs = late(example.to(device_of(model))) if isinstance(example, torch.Tensor) else example
    dtype = other_dtype(model, inputs)

    def extractor_for(given: Any) -> DualGraphModule:
        return create_feature_extractor(model, nodes, example_inputs=given, suppress_diff_warning=True)

    with _told_of_model(example):
        try:
            extractor = extractor_for(inputs)
        except Exception:  # images of floats, perhaps, and a model in half precision
            if dtype is None:
                raise
            extractor = extractor_for(inputs.to(dtype))
    return extractor.eval()


@contextmanager
def _told_of_model(batch: Any) -> Generator[None]:
    """Tell what the model raises for a batch of the first sample as an error that has its shape.

    Raises:
        ModelFailsError: so it is.
    """
    try:
        yield
    except FeatxError:
        raise
    except Exception as error:  # the model's own
        leaves = tensors_in(batch)
        are_batches = bool(leaves) and all(map(_has_batch_of_one, leaves))
        shapes = ", ".join(str(tuple(leaf.shape)) for leaf in leaves)
        hint = f". It got the shape {shapes}; transform=... (--size for pixels) makes another input of a sample"
        if are_batches:
            hint = ". A sample has no dimension for the batch; take the first item, value[0], of each tensor"
        raise ModelFailsError(f"the model fails on the first sample: {type(error).__name__}: {error}{hint}") from error


def _has_batch_of_one(batch: torch.Tensor) -> bool:
    """Say whether the samples of a batch seem to be batches of one, and not images of one channel."""
    is_of_images = batch.is_floating_point() and batch.dim() == 4
    return batch.dim() > 1 and batch.shape[1] == 1 and not is_of_images


def _format_of(columns: Iterable[Column]) -> Format:
    is_map = any(len(column.shape) > 1 or column.bytes > _LARGEST_VECTOR * 4 for column in columns)
    return "arrow" if is_map else "parquet"


def _rows_of_shard(samples: int, size: int, seconds: float) -> int:
    """Return how many rows a shard should have, of samples of so many bytes, each of which takes so many seconds."""
    fitting = min(_BYTES_OF_SHARD // max(size, 1), int(_SECONDS_OF_SHARD / max(seconds, 1e-6)))
    return max(_FEWEST_ROWS, min(_MOST_ROWS, fitting), -(-samples // _MOST_SHARDS))
