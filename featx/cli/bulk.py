"""The commands for data sets: extract, verify, errors and retry."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import chdir, nullcontext
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

import featx
from featx.bulk.storage.files import pattern_root
from featx.cli.errors import UserError, told
from featx.cli.options import (
    RANDOM_WEIGHTS,
    AsJson,
    DType,
    Model,
    Nodes,
    Pool,
    Pretrained,
    Seed,
    Size,
    Weights,
)  # fmt: skip

Source = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="A folder of images, a pattern such as 'photos/*.jpg', a .txt, .csv or .parquet list, or a .tar.",
    ),
]
Output = Annotated[str, typer.Argument(metavar="OUTPUT", help="A folder, or a URL such as s3://bucket/features.")]
Features = Annotated[str, typer.Argument(metavar="FEATURES", help="What `featx extract` has written.")]
# Under this name the job file keeps what was typed.
_COMMAND = "command"
# Where it was typed: paths, and modules of Python, may be named from there.
_FOLDER = "folder"


def extract(
    model: Model,
    source: Source,
    output: Output,
    node: Nodes,
    pool: Annotated[Pool | None, typer.Option(help="Reduce the places, or the tokens.")] = None,
    dtype: Annotated[DType | None, typer.Option(help="The type of the features.")] = None,
    size: Size = None,
    column: Annotated[str | None, typer.Option(help="The column of a table that has paths.")] = None,
    batch: Annotated[int | None, typer.Option(help="How many images run at once; by default measured.")] = None,
    rows: Annotated[int | None, typer.Option(help="How many samples a file has; by default a minute's.")] = None,
    workers: Annotated[int | None, typer.Option(help="How many processes read images.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, or several as cuda:0,cuda:1.")] = None,
    engine: Annotated[str | None, typer.Option(help="ray: hand the work to actors of a cluster.")] = None,
    actors: Annotated[int | None, typer.Option(help="How many actors.")] = None,
    fast: Annotated[
        float | None, typer.Option(metavar="TOLERANCE", help="Faster, with features off by so much: 0.01 is 1 %.")
    ] = None,
    any_rows: Annotated[
        bool,
        typer.Option("--any-rows", help="Also features that depend on the other samples of a batch, or on chance."),
    ] = False,
    rank: Annotated[int | None, typer.Option(help="Which of --world processes this one is.")] = None,
    world: Annotated[int | None, typer.Option(help="How many processes do the job.")] = None,
    pretrained: Pretrained = False,
    weights: Weights = None,
    seed: Seed = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print no progress.")] = False,
) -> None:
    """Compute features of a data set, and write them to a folder; a job that was killed goes on.

    Random weights have the seed 0, so that the job can go on.
    """
    options: dict[str, Any] = {
        "model": model, "source": _absolute(source), "output": output, "node": node,
        "pool": None if pool is None else pool.value, "dtype": None if dtype is None else dtype.value,
        "size": size, "column": column, "batch": batch, "rows": rows, "workers": workers, "device": device,
        "engine": engine, "actors": actors, "pretrained": pretrained,
        "weights": None if weights is None else _absolute(str(weights)), "seed": seed, "fast": fast,
        "any_rows": any_rows, _FOLDER: os.getcwd(),
    }  # fmt: skip
    with told():
        try:
            _tell(_run(options, rank=rank, world=world, quiet=quiet))
        except KeyboardInterrupt:
            typer.echo("interrupted: finished shards are kept, and the same command goes on", err=True)
            raise


def verify(features: Features, as_json: AsJson = False) -> None:
    """Read all features, and say whether each sample is there once; the exit code is 1 where that is not so."""
    with told():
        found = featx.verify(features)
        typer.echo(json.dumps(vars(found)) if as_json else str(found))
        if not found.is_complete:
            raise typer.Exit(1)


def errors(features: Features, as_json: AsJson = False) -> None:
    """List the samples that have failed, and why."""
    with told():
        failures = featx.open_features(features).errors
        if as_json:
            typer.echo(json.dumps([{"key": key, "reason": reason} for key, reason in failures]))
        elif failures:
            typer.echo("\n".join(f"{key}\t{reason}" for key, reason in failures))
        else:
            typer.echo("no sample has failed", err=True)


def retry(
    features: Features, quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print no progress.")] = False
) -> None:
    """Compute the samples again that have failed, with what `featx extract` was told."""
    with told():
        options: dict[str, Any] | None = dict(featx.open_features(features).job.recorded.get(_COMMAND) or {})
        if not options:
            raise UserError(f"'{features}' was not made by `featx extract`: call featx.extract(..., retry=True) again")
        options["output"], folder = _absolute(features), options.get(_FOLDER, "")
        with chdir(folder) if os.path.isdir(folder) else nullcontext():
            _tell(_run(options, retry=True, quiet=quiet))


def _run(
    options: dict[str, Any], *, rank: int | None = None, world: int | None = None, retry: bool = False, quiet: bool
) -> featx.FeatureTable:
    from featx.cli.images import transform_of_model
    from featx.cli.models import load_model
    from featx.cli.requests import requested

    _check_source(options["source"])
    spec, weights, seed = options["model"], options["weights"], options["seed"]
    if seed is None and weights is None and not options["pretrained"]:
        seed = 0
        if not quiet:
            typer.echo(RANDOM_WEIGHTS, err=True)
    path = None if weights is None else Path(weights)
    model = load_model(spec, pretrained=options["pretrained"], weights=path, seed=seed)
    engine: Literal["ray"] | None = options["engine"]
    return featx.extract(
        model, requested(options["node"], options["pool"], options["dtype"]), options["source"], options["output"],
        transform=transform_of_model(model, spec, options["size"]), column=options["column"],
        batch_size=options["batch"], rows_per_shard=options["rows"], workers=options["workers"],
        device=_devices(options["device"]), engine=engine, actors=options["actors"], rank=rank, world_size=world,
        tolerance=options.get("fast"), retry=retry, check_rows=not options.get("any_rows"),
        progress=not quiet, recorded={_COMMAND: options},
    )  # fmt: skip


def _check_source(source: str) -> None:
    """Raise where there is no such file or folder, before making the model, which may take long."""
    if "://" not in source and pattern_root(source) is None and not Path(source).exists():
        raise UserError(f"there is no '{source}'; give a folder of images, a list of paths, a .tar, or a URL")


def _devices(text: str | None) -> str | Sequence[str] | None:
    return text if text is None or "," not in text else [each.strip() for each in text.split(",")]


def _absolute(path: str) -> str:
    """Return a path that `featx retry` finds from another folder."""
    return path if "://" in path or not path else str(Path(os.path.expanduser(path)).absolute())


def _tell(table: featx.FeatureTable) -> None:
    typer.echo(table)
    if table.errors:
        typer.echo(f"{len(table.errors)} samples have failed: `featx errors` lists them", err=True)
