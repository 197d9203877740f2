"""extract: features of a data set, computed and written in shards."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, cast, get_args

import torch
from torch import nn

from featx.bulk.extras import require
from featx.bulk.jobs.engines import Engine, OneProcessPerDevice, Ray, ThisProcess
from featx.bulk.jobs.first_sample import DIFFERS, FirstSample, readable_samples
from featx.bulk.jobs.job import read_job, start_job
from featx.bulk.jobs.job_plan import (
    OPTIMIZATION,
    RECORDED,
    JobOptions,
    first_computed,
    identity_of,
    plan_job,
)
from featx.bulk.jobs.progress import Progress, in_units
from featx.bulk.jobs.ranks import Share, share_of
from featx.bulk.jobs.shards import Work, finished
from featx.bulk.samples.loading import Samples
from featx.bulk.samples.preprocessing import Preprocessing
from featx.bulk.samples.reading import Reader, RowOfTokens
from featx.bulk.samples.sources import Rows, find_source
from featx.bulk.storage.folder import Folder
from featx.bulk.storage.formats import Format
from featx.bulk.storage.remote import open_folder
from featx.bulk.table import FeatureTable, open_features
from featx.errors import ArgumentTypeError, ExtractionError
from featx.features.building.feature_tracer import check_model
from featx.features.extractor import Nodes
from featx.features.modes import modes_kept

_MOST_WORKERS = 8
# Seconds that `timeout` may have.
_LONGEST = 366 * 24 * 3600


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
    check_rows: bool = True,
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

    Memory is that of the model, of a few batches, and of the rows that are written together: some 64 MB of Parquet, or
    16 rows of an Arrow file, a few times over. `retry` holds a shard. Cost: see docs/bulk.md.

    Args:
        model: what computes the features; an extractor where `nodes` is None. One with adaptive=True takes samples that
            the model treats in other ways, such as images of other sizes.
        nodes: as for `create_feature_extractor`: names with keys, and with `Feature(pool=..., dtype=...)`, which is
            computed before anything is written.
        source: a folder of images, or the URL of one; a pattern of files, such as `photos/**/*.jpg`; a list of paths or
            URLs, or a .txt, .csv or .parquet file with them; .tar files of webdataset, or a pattern for them such as
            `data-{000..099}.tar`; a data set of Hugging Face, or a torch Dataset with a length. Keys are the paths
            below the folder, the paths of a list, or the numbers of the samples.
        output: a folder, which is made, or has this job already; or a URL that fsspec knows, such as
            `s3://bucket/features`.
        transform: from an image of Pillow to a tensor; by default what the model declares: timm's data configuration,
            the image processor of transformers. With `load`, from what that returns.
        load: from an item of the source to an input, in place of decoding an image: a path, an open file or a sample,
            with all of its parts. It may return a tensor, or a dict or tuple of tensors, for one sample.
        column: of a table or data set, the column with paths or images.
        format: "parquet" or "arrow", by default what fits: Parquet for vectors, Arrow files for maps.
        batch_size: how many samples run at once; by default it is measured when the job starts, and kept when that
            goes on.
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
            looked for when the job starts, on the first sample and eight others, spread over the source, within two
            minutes; the job file holds it, with the errors. Other samples may have larger ones. By default features
            are exact.
        retry: compute the samples again that have failed.
        timeout: seconds that reading one sample may take in a process of its own, or in a thread when the job starts
            and looks at some; one that takes longer is a failure.
            The job ends where no sample at all is read for so long.
        check_rows: refuse a feature of which the row of a sample depends on the other samples of its batch, or is
            another one each time. It is looked for on the first sample, when the job starts or goes on.
        progress: show a bar on the standard error stream.
        recorded: what is kept in the job file besides, for people.

    Returns:
        The features, as `open_features(output)` gives them.

    Raises:
        ExtractionError: there are no samples, or none can be read; `output` has another job; the disk is too small, or
            full; a process that reads was lost; a device is not there.
        MissingExtraError: a package is not installed; the message has the command that installs it.
        TraceError, RequestError: as for `create_feature_extractor`; or see `check_rows`.
    """
    require("pyarrow", "pyarrow writes features")
    if nodes is not None:
        model = check_model(model)
    _check_numbers(
        format, timeout, batch_size=batch_size, rows_per_shard=rows_per_shard, workers=workers, actors=actors
    )
    _check_callable(transform=transform, load=load)
    _check_recorded(recorded)
    share = share_of(rank, world_size)
    is_list = isinstance(device, (tuple, list))
    given = [_device(each) for each in cast("Sequence[Any]", device if is_list else [device]) if each is not None]
    devices = given if is_list else []
    one = given[0] if given and not is_list else None
    hands_out = _engine(devices, one, engine, actors, actor_options)
    _check_present(given)
    folder = open_folder(output)
    found = find_source(source, column, has_load=load is not None, output=folder.path)
    reader = Reader.of(model, transform, load, has_tokens=isinstance(found, Rows) and _has_tokens(found, model))
    options = JobOptions(format, batch_size, rows_per_shard, tolerance)
    processes = _default_workers() if workers is None else workers
    with modes_kept(model):
        there = read_job(folder)
        readable = readable_samples(found, reader, there, timeout)
        first, extractor, runner = first_computed(readable, model, nodes, reader, one, check_rows=check_rows)
        searches = tolerance is not None and there is None
        sample = FirstSample.of(first, found, reader, there, timeout, processes, keeps_others=searches)
        identity = identity_of(model, extractor, runner.columns, found, reader, sample, tolerance)
        if there is None:
            planned = plan_job(identity, len(found.keys), runner, sample, options, is_shown=progress)
            planned = replace(planned, recorded={**(recorded or {}), **planned.recorded})
            if share.world_size == 1:  # before there is a job that another choice would not fit
                _check_space(folder, planned.samples, planned.bytes)
        else:  # nothing is measured again
            planned = replace(there, identity=identity)
        folder.make()
        job = start_job(folder, planned, found.keys, options.kept)
        size = batch_size or int(job.recorded["batch_size"])
        if tolerance is not None:
            runner = runner.optimized(job.recorded[OPTIMIZATION], size)
        work = Work(job, folder, found.keys, Samples(found, reader), runner, size, processes, timeout)
        _do(work, hands_out, share, reader.preprocessing, retry=retry, is_shown=progress)
    return open_features(output)


def _has_tokens(rows: Rows, model: nn.Module) -> bool:
    return rows.has_tokens or ("input_ids" in RowOfTokens.of(model).names and rows.starts_with_tokens())


def _check_numbers(format: Format | None, timeout: object, **numbers: int | None) -> None:
    if format not in (None, *get_args(Format)):
        raise ArgumentTypeError(f"format must be one of {', '.join(get_args(Format))}, got {format!r}")
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout <= _LONGEST:
        raise ArgumentTypeError(f"timeout must be a number of seconds above 0, up to a year, got {timeout!r}")
    for name, number in numbers.items():
        least = 0 if name == "workers" else 1
        if number is not None and (type(number) is not int or number < least):
            raise ArgumentTypeError(f"{name} must be a number of {least} or more, got {number!r}")


def _check_callable(**functions: object) -> None:
    for name, function in functions.items():
        if function is not None and not callable(function):
            raise ArgumentTypeError(f"{name} must be a function, got {function!r:.80}")


def _check_recorded(recorded: object) -> None:
    """Raise where `recorded` is nothing that the job file can hold beside what featx notes there."""
    if recorded is None:
        return
    try:
        names = set(json.loads(json.dumps(dict(cast("Mapping[str, Any]", recorded)))))
    except (TypeError, ValueError) as error:
        raise ArgumentTypeError(
            f"recorded must be a dict that json can write, got {recorded!r:.80}: {error}"
        ) from error
    taken = names & RECORDED
    if taken:
        raise ArgumentTypeError(f"recorded['{min(taken)}'] is what featx notes itself; choose another name")


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
        if device.type not in ("cpu", "cuda"):
            try:
                torch.zeros(1, device=device).cpu()
            except Exception as error:  # of whatever backend
                reason = str(error).partition("\n")[0]
                raise ExtractionError(f"device '{device}' cannot be used here: {reason}") from error


def _engine(
    devices: Sequence[torch.device], one: torch.device | None, engine: str | None, actors: int | None,
    options: Mapping[str, Any] | None,
) -> Engine:  # fmt: skip
    """Return who does the shards.

    Raises:
        ArgumentTypeError: arguments do not go together.
    """
    if engine not in (None, "ray"):
        raise ArgumentTypeError(f"engine may be 'ray', got {engine!r}; without one this machine does the job")
    if engine is None and (actors is not None or options is not None):
        raise ArgumentTypeError("actors and actor_options are those of engine='ray'")
    if engine is not None:
        if devices or (one is not None and one.type != "cpu"):
            raise ArgumentTypeError("actors of Ray have one device each: give actor_options={'num_gpus': 1}, and none")
        return Ray(actors, options or {})
    return OneProcessPerDevice(devices) if devices else ThisProcess()


def _do(
    work: Work,
    engine: Engine,
    share: Share,
    preprocessing: Preprocessing,
    *,
    retry: bool,
    is_shown: bool,
) -> None:
    job = work.job
    mine = range(share.rank, job.shards, share.world_size)
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
    if share.world_size > 1:
        progress.say(f"this process does {share}")
    if str(job.identity.get("sample", "")).endswith(DIFFERS):
        progress.say("the transform gives another input each time, so that another run gives other features")
    progress.say(f"{job.samples} samples, {total} to do: {in_units(needed)} of {in_units(job.bytes)}, as {job.format}")
    progress.say(f"transform: {preprocessing.text}; batch size {work.batch_size}, {work.workers} processes read")
    _check_space(work.folder, total, needed)
    if todo:
        with progress:
            engine.run(work, dict(sorted(todo.items())), progress)
        progress.say(progress.summary())


def _check_space(folder: Folder, samples: int, needed: int) -> None:
    free = folder.free_bytes()
    if free is not None and needed > free:
        raise ExtractionError(
            f"the features of {samples} samples take {in_units(needed)}, and the disk of '{folder.path}' has "
            f"{in_units(free)}; pool them, ask for dtype=torch.float16, or choose another disk"
        )


def _default_workers() -> int:
    return min(_MOST_WORKERS, max(1, (os.cpu_count() or 2) - 1))
