"""extract: features of a data set, computed and written in shards."""

from __future__ import annotations

import copy
import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import torch
from torch import nn

from featx.bulk.compute import Runner, dtype_of_weights, in_dtype
from featx.bulk.decode import decode_image, decoder
from featx.bulk.engines import Engine, OneProcessPerDevice, Ray, ThisProcess
from featx.bulk.extras import require
from featx.bulk.fingerprint import fingerprint, fingerprint_of_code
from featx.bulk.formats import Format, check_columns
from featx.bulk.job import Job, hash_of_keys, hash_of_weights, read_job, start_job
from featx.bulk.loading import Samples, as_input, reason_of, stacked
from featx.bulk.memory import free_memory, most_memory
from featx.bulk.preprocessing import Preprocessing, find_preprocessing, plain, text_of
from featx.bulk.progress import Progress, in_units
from featx.bulk.ranks import share_of
from featx.bulk.remote import open_folder
from featx.bulk.shards import Work, finished
from featx.bulk.sources import Rows, Source, find_source
from featx.bulk.table import FeatureTable, open_features
from featx.errors import ArgumentTypeError, ExtractionError, FeatxError
from featx.features.dual import DualGraphModule
from featx.features.extractor import Nodes, create_feature_extractor
from featx.optimization.hardware import device_of

# A shard is about so many bytes, and takes about so many seconds, within these numbers of rows. So that folders can be
# listed, there are at most so many shards.
_BYTES_OF_SHARD, _SECONDS_OF_SHARD, _FEWEST_ROWS, _MOST_ROWS, _MOST_SHARDS = 64_000_000, 60.0, 64, 10_000, 100_000
# More numbers than that in one sample are a map.
_LARGEST_VECTOR = 16_384
_TRIED_SAMPLES = 100
# So many inputs of a data set, whose keys are numbers, tell it from another one.
_OTHER_SAMPLES = 8
# Under this name the job file keeps the plan of `featx.optimize`.
OPTIMIZATION = "optimization"
_MOST_WORKERS = 8
# When no larger batch is tried: so much slower is it, for each sample, than the best; or it takes so long.
_SLOWER, _SECONDS_OF_BATCH, _LARGEST_BATCH = 1.3, 0.7, 256
# What takes longer is not timed a second time.
_SECONDS_OF_TRIAL = 0.1


def extract(
    model: nn.Module,
    nodes: Nodes | None,
    source: Any,
    output: str | os.PathLike[str],
    *,
    transform: Callable[[Any], Any] | None = None,
    load: Callable[[Any], Any] | None = None,
    column: str | None = None,
    format: Format | None = None,
    batch_size: int | None = None,
    rows_per_shard: int | None = None,
    workers: int | None = None,
    device: str | torch.device | Sequence[str | torch.device] | None = None,
    engine: Literal["ray"] | None = None,
    actors: int | None = None,
    actor_options: Mapping[str, Any] | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    tolerance: float | None = None,
    retry: bool = False,
    timeout: float = 300.0,
    progress: bool = True,
    recorded: Mapping[str, Any] | None = None,
) -> FeatureTable:
    """Compute features of all samples of `source`, write them to the folder `output`, and return them.

    Samples are divided into shards by their order, and a shard is a file that appears when it is whole. A job that was
    killed, at whatever moment, goes on when it is started again, and computes no finished shard twice. A sample that
    cannot be read, or for which the model raises, becomes a failure in the file of its shard, with the reason: each key
    is in exactly one of rows and failures. The model runs in eval mode, without gradients, and is as before afterwards.

    The job file in `output` says what the features depend on: the model's code and weights, what is done to each
    feature, the keys, the transform and the decoder. A job that differs in any of these is refused.

    Memory is that of the model and of a few batches. Cost: see docs/bulk.md.

    Args:
        model: what computes the features; an extractor where `nodes` is None.
        nodes: as for `create_feature_extractor`: names with keys, and with `Feature(pool=..., dtype=...)`, which is
            computed before anything is written.
        source: a folder of images, or the URL of one; a list of paths or URLs, or a .txt, .csv or .parquet file with
            them; .tar files of webdataset; a data set of Hugging Face, or a torch Dataset with a length. Keys are the
            paths below the folder, the paths of a list, or the numbers of the samples.
        output: a folder, which is made, or has this job already; or a URL that fsspec knows, such as
            `s3://bucket/features`.
        transform: from an image of Pillow to a tensor; by default what the model declares: timm's data configuration,
            the image processor of transformers. With `load`, from what that returns.
        load: from an item of the source to an input, in place of decoding an image: a path, an open file or a sample.
            It may return a tensor, or a dict or tuple of tensors, for one sample.
        column: of a table or data set, the column with paths or images.
        format: "parquet" or "arrow", by default what fits: Parquet for vectors, Arrow files for maps.
        batch_size: how many samples run at once; by default it is measured. It is kept when a job goes on.
        rows_per_shard: how many samples a file has; by default what a minute computes, and at most about 64 MB. It is
            what a kill may lose. It is kept when a job goes on.
        workers: how many processes read samples; by default one less than there are processors, at most eight.
        device: where the model runs; by default where it is. Another one gets a copy of the extractor. A list, such as
            `["cuda:0", "cuda:1"]`, starts a process for each, which reads with `workers` processes of its own.
        engine: "ray" hands shards to actors of Ray, on the cluster that `ray.init` finds.
        actors: how many of them; by default as many as the cluster has processors, or GPUs where they ask for these.
        actor_options: as `ray.remote` takes them: `{"num_cpus": 4, "num_gpus": 1}`.
        rank: which of `world_size` processes this one is: it does each shard whose number has that remainder. By
            default what torchrun, Slurm or Kubernetes say, or one process does all.
        world_size: how many processes do the job.
        tolerance: compute faster with features that may have this relative error, see `featx.optimize`. What is done is
            looked for when the job starts, on the first sample, within two minutes; the job file holds it, with the
            errors. By default features are exact.
        retry: compute the samples again that have failed.
        timeout: seconds after which a process that reads is taken to hang.
        progress: show a bar on the standard error stream.
        recorded: what is kept in the job file besides, for people.

    Returns:
        The features, as `open_features(output)` gives them.

    Raises:
        ExtractionError: there are no samples, or none can be read; `output` has another job; the disk is too small, or
            full; a process that reads was lost; a device is not there.
        MissingExtraError: a package is not installed; the message has the command that installs it.
        TraceError, RequestError: as for `create_feature_extractor`.
    """
    require("pyarrow", "pyarrow writes features")
    _check_numbers(format, batch_size=batch_size, rows_per_shard=rows_per_shard, workers=workers, actors=actors)
    share = share_of(rank, world_size)
    is_list = isinstance(device, (tuple, list))
    given = [_device(each) for each in cast("Sequence[Any]", device if is_list else [device]) if each is not None]
    devices = given if is_list else []
    one = given[0] if given and not is_list else None
    hands_out = _engine(devices, engine, actors, actor_options)
    _check_present(given)
    found = find_source(source, column, has_load=load is not None)
    read = _Read.of(model, transform, load)
    with _modes_kept(model):
        folder = open_folder(output)
        there = read_job(folder)
        known = {} if there is None else there.recorded
        seen = _SeenSample.of(found, read, there)
        plan = _plan(
            model, nodes, found, read, seen, format, batch_size, rows_per_shard, one, tolerance, known, progress
        )
        folder.make()
        job = start_job(folder, plan.job(recorded or {}), found.keys, plan.asked)
        size = int(job.recorded["batch_size"])
        runner = plan.runner if tolerance is None else plan.runner.optimized(job.recorded[OPTIMIZATION], size)
        work = Work(
            job, folder, found.keys, Samples(found, read), runner, size, _workers() if workers is None else workers,
            timeout,
        )  # fmt: skip
        _do(work, hands_out, share, read.preprocessing, retry=retry, is_shown=progress)
    return open_features(output)


def _check_numbers(format: Format | None, **numbers: int | None) -> None:
    if format not in (None, *get_args(Format)):
        raise ArgumentTypeError(f"format must be one of {', '.join(get_args(Format))}, got {format!r}")
    for name, number in numbers.items():
        least = 0 if name == "workers" else 1
        if number is not None and (type(number) is not int or number < least):
            raise ArgumentTypeError(f"{name} must be a number of {least} or more, got {number!r}")


def _device(given: str | torch.device) -> torch.device:
    try:
        return torch.device(given)
    except RuntimeError as error:
        raise ExtractionError(f"device {given!r} is none of torch's, such as 'cpu', 'cuda' and 'cuda:1'") from error


def _check_present(devices: Iterable[torch.device]) -> None:
    count = torch.cuda.device_count()
    for device in devices:
        if device.type == "cuda" and (device.index or 0) >= count:
            raise ExtractionError(f"device '{device}' is not there; torch finds {count} CUDA devices")


def _engine(
    devices: Sequence[torch.device], engine: str | None, actors: int | None, options: Mapping[str, Any] | None
) -> Engine:
    """Return who does the shards.

    Raises:
        ArgumentTypeError: arguments do not go together.
    """
    if engine not in (None, "ray"):
        raise ArgumentTypeError(f"engine may be 'ray', got {engine!r}; without one this machine does the job")
    if engine is None and (actors is not None or options is not None):
        raise ArgumentTypeError("actors and actor_options are those of engine='ray'")
    if engine is not None:
        if devices:
            raise ArgumentTypeError("actors of Ray have one device each: give actor_options={'num_gpus': 1}, and none")
        return Ray(actors, options or {})
    return OneProcessPerDevice(devices) if devices else ThisProcess()


def _do(
    work: Work,
    engine: Engine,
    share: tuple[int, int],
    preprocessing: Preprocessing,
    *,
    retry: bool,
    is_shown: bool,
) -> None:
    job, (rank, world_size) = work.job, share
    mine = range(rank, job.shards, world_size)
    known = finished(job, work.folder, mine)
    todo: dict[int, Sequence[int]] = {shard: job.numbers(shard) for shard in mine if shard not in known}
    if retry:
        for shard in mine:
            failed = {key for key, _ in known[shard].failures} if shard in known else ()
            if failed:
                todo[shard] = [number for number in job.numbers(shard) if work.keys[number] in failed]
    total = sum(len(numbers) for numbers in todo.values())
    needed = total * sum(column.bytes for column in job.columns)
    progress = Progress(total, is_shown=is_shown)
    progress.say(f"source: {work.samples.kind}")
    progress.say(f"{job.samples} samples, {total} to do: {in_units(needed)} of {in_units(job.bytes)}, as {job.format}")
    progress.say(f"transform: {preprocessing.text}; batch size {work.batch_size}, {work.workers} processes read")
    free = work.folder.free_bytes()
    if free is not None and needed > free:
        raise ExtractionError(
            f"the features of {total} samples take {in_units(needed)}, and the disk of '{work.folder.path}' has "
            f"{in_units(free)}; pool them, ask for dtype=torch.float16, or choose another disk"
        )
    if todo:
        with progress:
            engine.run(work, dict(sorted(todo.items())), progress)
        progress.say(progress.summary())


@dataclass(frozen=True)
class _Read:
    """Makes an input of an item of a source; runs in the processes that read."""

    load: Callable[[Any], Any] | None
    preprocessing: Preprocessing

    @staticmethod
    def of(model: nn.Module, transform: Callable[[Any], Any] | None, load: Callable[[Any], Any] | None) -> _Read:
        if load is not None:
            return _Read(load, plain(transform))
        return _Read(None, find_preprocessing(model, transform))

    def __call__(self, item: Any) -> Any:
        value = self._decoded(item) if self.load is None else self.load(item)
        return self.preprocessing.early(value)

    def _decoded(self, item: Any) -> Any:
        if not isinstance(item, torch.Tensor):
            return decode_image(item)
        if self.preprocessing.is_declared:
            raise ArgumentTypeError(
                "the samples are tensors, and the preprocessing that the model declares is for images, and normalizes "
                "them; give transform=torch.nn.Identity() if they are what the model takes, or a transform of tensors"
            )
        return item

    @property
    def decoder(self) -> str:
        return decoder() if self.load is None else text_of(self.load)


@dataclass(frozen=True)
class _Plan:
    """What is known of a job before it starts."""

    runner: Runner
    identity: dict[str, Any]
    samples: int
    batch_size: int
    rows_per_shard: int
    format: Format
    device: torch.device
    asked: dict[str, Any]
    # What makes the extractor faster, where that is asked for.
    optimization: dict[str, Any] | None

    def job(self, recorded: Mapping[str, Any]) -> Job:
        versions = {"python": platform.python_version(), "torch": torch.__version__}
        more: dict[str, Any] = {"batch_size": self.batch_size, "device": str(self.device), "versions": versions}
        if self.optimization is not None:
            more[OPTIMIZATION] = self.optimization
        return Job(
            self.identity, self.samples, self.rows_per_shard, self.format, self.runner.columns, {**more, **recorded}
        )


def _plan(
    model: nn.Module,
    nodes: Nodes | None,
    source: Source,
    read: _Read,
    seen: _SeenSample,
    format: Format | None,
    batch_size: int | None,
    rows_per_shard: int | None,
    device: torch.device | None,
    tolerance: float | None,
    known: Mapping[str, Any],
    is_shown: bool,
) -> _Plan:
    """Return the plan. What is `known` of a job that is there is neither timed nor looked for again."""
    example = seen.value
    late = read.preprocessing.late
    extractor = _extractor(model, nodes, stacked([example, example]), late)
    where = device_of(extractor)
    if device is not None and device != where:
        where = device
        extractor = copy.deepcopy(extractor).to(where)
    runner = Runner(extractor, late, where)
    runner.set_columns(runner.features(stacked([example])), runner.features(stacked([example] * 2)))
    check_columns(runner.columns)
    size = sum(column.bytes for column in runner.columns)
    is_map = any(len(column.shape) > 1 or column.bytes > _LARGEST_VECTOR * 4 for column in runner.columns)
    columns = [[each.name, list(each.shape), str(each.dtype)] for each in runner.columns]
    identity: dict[str, Any] = {
        "model": type(model).__name__,
        "nodes": {info.key: info.node for info in extractor.feature_info},
        "code": extractor.code,
        "modules": fingerprint_of_code(extractor, extractor.graph),
        "weights": hash_of_weights(extractor),
        "columns": columns,
        "transform": read.preprocessing.text,
        "decoder": read.decoder,
        "keys": hash_of_keys(source.keys),
        "sample": seen.text,
    }
    if tolerance is not None:
        identity["tolerance"] = tolerance
    asked = {"format": format, "rows_per_shard": rows_per_shard}
    samples = len(source.keys)
    known_size = known.get("batch_size")
    batch_size, seconds = (int(known_size), 1.0) if known_size else _batch_size(runner, example, batch_size)
    optimization: dict[str, Any] | None = known.get(OPTIMIZATION)
    if tolerance is not None and optimization is None:
        optimization = runner.optimization(stacked([example] * batch_size), tolerance, is_shown=is_shown)
        seconds *= optimization["chosen"]["ratio"]
    return _Plan(
        runner, identity, samples, batch_size, rows_per_shard or _rows_of_shard(samples, size, seconds),
        format or ("arrow" if is_map else "parquet"), where,
        {name: value for name, value in asked.items() if value is not None}, optimization,
    )  # fmt: skip


@dataclass(frozen=True)
class _SeenSample:
    """An input of the source, by which another source with the same keys is told apart.

    Attributes:
        value: the input.
        text: the number of the sample, and a hash of the input; of a data set of some others too.
    """

    value: Any
    text: str

    @staticmethod
    def of(source: Source, read: _Read, job: Job | None) -> _SeenSample:
        """Read the first sample that can be read, or the one that a job has seen."""
        seen = None if job is None else str(job.identity.get("sample", "")).partition(" ")[0]
        numbers = [int(seen)] if seen and int(seen) < len(source.keys) else range(min(len(source.keys), _TRIED_SAMPLES))
        reasons: list[str] = []
        for number in numbers:
            try:
                value, again = (as_input(read(source.item(number))) for _ in range(2))
            except ArgumentTypeError:
                raise
            except Exception as error:  # whatever a file or a function of the user's leads to
                reasons.append(f"'{source.keys[number]}': {reason_of(error)}")
                continue
            hashes = {fingerprint(value), fingerprint(again)}
            if len(hashes) > 1:
                return _SeenSample(value, f"{number} differs each time")
            return _SeenSample(value, " ".join([str(number), hashes.pop(), *_hashes_of_others(source, read)]))
        raise ExtractionError(f"none of the first {len(reasons)} samples of {source.kind} can be read: {reasons[0]}")


def _hashes_of_others(source: Source, read: _Read) -> Iterator[str]:
    """Yield hashes of some inputs of a source whose keys are numbers alone, so that another one has the same keys."""
    if not isinstance(source, Rows):
        return
    count = len(source.keys)
    for number in sorted({count * part // _OTHER_SAMPLES for part in range(1, _OTHER_SAMPLES)} | {count - 1}):
        try:
            yield fingerprint(as_input(read(source.item(number))))
        except Exception as error:  # it will be a failure
            yield type(error).__name__


def _extractor(
    model: nn.Module, nodes: Nodes | None, example: Any, late: Callable[[torch.Tensor], torch.Tensor]
) -> DualGraphModule:
    if nodes is None:
        if not isinstance(model, DualGraphModule):
            raise ArgumentTypeError(f"nodes=None is for an extractor, and the model is a {type(model).__name__}")
        return model.eval()
    is_image = isinstance(example, torch.Tensor)
    inputs = in_dtype(late(example.to(device_of(model))), dtype_of_weights(model)) if is_image else example
    try:
        extractor = create_feature_extractor(model, nodes, example_inputs=inputs, suppress_diff_warning=True)
    except FeatxError:
        raise
    except Exception as error:  # the model's own
        raise ExtractionError(f"the model fails on the first sample: {type(error).__name__}: {error}") from error
    return extractor.eval()


@contextmanager
def _modes_kept(model: nn.Module) -> Any:
    """Give the modules of a model back the modes in which they are; an extractor shares them."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        if isinstance(model, DualGraphModule):
            model.train(modes[0][1])
        for module, training in modes:
            if module.training is not training:
                module.training = training


def _workers() -> int:
    return min(_MOST_WORKERS, max(1, (os.cpu_count() or 2) - 1))


def _rows_of_shard(samples: int, size: int, seconds: float) -> int:
    """Return how many rows a shard should have, of samples of so many bytes, each of which takes so many seconds."""
    fitting = min(_BYTES_OF_SHARD // max(size, 1), int(_SECONDS_OF_SHARD / max(seconds, 1e-6)))
    return max(_FEWEST_ROWS, min(_MOST_ROWS, fitting), -(-samples // _MOST_SHARDS))


def _batch_size(runner: Runner, example: Any, chosen: int | None) -> tuple[int, float]:
    """Return how many samples should run at once, and how many seconds one of them takes then.

    Without a choice it is that of 1, 4, 16, 64 and 256 of which one sample takes the least time, as far as the memory
    of the machine and of its GPU goes.
    """
    if chosen is not None:
        return chosen, _seconds(runner, example, chosen)
    times: dict[int, float] = {}
    size = 1
    while size <= _LARGEST_BATCH:
        before = most_memory()
        try:
            times[size] = _seconds(runner, example, size)
        except (torch.OutOfMemoryError, MemoryError):
            break
        is_slow = times[size] * size > _SECONDS_OF_BATCH or times[size] > _SLOWER * min(times.values())
        # The next batch takes four times as much, and the processes that read hold a few of them.
        if is_slow or 4 * (most_memory() - before) > free_memory() / 2:
            break
        size *= 4
    best = min(times, key=times.__getitem__, default=1)
    return best, times.get(best, 1.0)


def _seconds(runner: Runner, example: Any, count: int) -> float:
    """Return the seconds that one of `count` samples takes."""
    batch = stacked([example] * count)
    times: list[float] = []
    while len(times) < 3 and not (times and times[-1] > _SECONDS_OF_TRIAL):
        start = time.perf_counter()
        runner.features(batch)
        times.append(time.perf_counter() - start)
    return min(times) / count
