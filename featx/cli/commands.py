"""The commands: each makes a model, asks featx, and prints a table, JSON or code, or writes a file.

What needs torch is imported by the command that needs it: importing torch takes seconds, and `--help` and the
completion of a shell do without.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer

import featx
from featx.cli.bulk import errors, extract, retry, verify
from featx.cli.errors import UserError, check_output, in_options, of_model, told
from featx.cli.options import PICTURES, AsJson, Inputs, Model, Nodes, Pool, Pretrained, Seed, Size, Weights


def _tell_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"featx {version('featx')}, torch {version('torch')}")
        raise typer.Exit


def main(
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Tell of each trace.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_tell_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Get any intermediate feature out of a PyTorch model."""
    logging.basicConfig(format="%(message)s")
    logging.getLogger("featx").setLevel(logging.DEBUG if verbose else logging.WARNING)


def nodes(
    model: Model,
    match: Annotated[str | None, typer.Option(help="A pattern of names: 'layer[34].*'.")] = None,
    type: Annotated[str | None, typer.Option(help="A class of modules or an operation: 'Conv2d', '*Norm*'.")] = None,
    stride: Annotated[float | None, typer.Option(help="Only maps of this stride.")] = None,
    depth: Annotated[int | None, typer.Option(min=1, help="Fold modules that lie deeper.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Operations, inputs and weights too.")] = False,
    inputs: Inputs = [],  # noqa: B006 - typer reads it
    pretrained: Pretrained = False,
    weights: Weights = None,
    seed: Seed = None,
    as_json: AsJson = False,
) -> None:
    """List the values inside a model, with shapes, strides, parameters and FLOPs."""
    from featx.cli.models import load_model
    from featx.cli.requests import inputs_of

    with told(takes_inputs=True):
        loaded = load_model(model, pretrained=pretrained, weights=weights, seed=seed)
        with of_model(_named(inputs)):
            table = featx.nodes(loaded, inputs_of(inputs), depth=depth)
        is_filtered = any(each is not None for each in (match, type, stride))
        found = table.filter(match, type=type, stride=stride, depth=depth if is_filtered else None)
        if not found:
            raise UserError("no node is like that; leave out --match, --type, --stride or --depth to see all")
        if as_json:
            typer.echo(json.dumps(found.to_dicts()))
            if found.note is not None:
                typer.echo(in_options(found.note, takes_inputs=True), err=True)
        else:
            inside = next((row.name.partition(".")[0] for row in table if "." in row.name), None)
            hint = "--depth N and --all show them"
            hint += "" if inside is None else f", and --match '{inside}.*' what is like that"
            text = found.to_text(depth, everything=everything or len(found) < len(table), hint=hint)
            typer.echo(in_options(text, takes_inputs=True))


def cost(
    model: Model,
    depth: Annotated[int, typer.Option(min=1, help="Fold modules that lie deeper.")] = 2,
    inputs: Inputs = [],  # noqa: B006 - typer reads it
    pretrained: Pretrained = False,
    weights: Weights = None,
    seed: Seed = None,
    as_json: AsJson = False,
) -> None:
    """Count parameters, FLOPs, bytes moved and memory of each module."""
    from featx.cli.models import load_model
    from featx.cli.requests import inputs_of, shapes_of

    with told(takes_inputs=True):
        loaded = load_model(model, pretrained=pretrained, weights=weights, seed=seed)
        with of_model(_named(inputs)):
            report = featx.cost(loaded, example_inputs=inputs_of(inputs), unknown="list")
        if as_json:
            typer.echo(json.dumps([dataclasses.asdict(module) for module in report.modules]))
        else:
            typer.echo(report.module_table(depth))
            typer.echo("\n" + "\n".join(str(report).splitlines()[-2 - len(report.unknown) :]))
            typer.echo(f"for inputs of {shapes_of(loaded, inputs)}")


def draw(
    model: Model,
    output: Annotated[Path, typer.Option("--output", "-o", help="A .html page, .svg or .dot.")] = Path("model.html"),
    depth: Annotated[int | None, typer.Option(min=0, help="How many levels are open.")] = None,
    inputs: Inputs = [],  # noqa: B006 - typer reads it
    pretrained: Pretrained = False,
    weights: Weights = None,
    seed: Seed = None,
) -> None:
    """Draw the graph of a model, folded by its modules, as a page that opens in any browser."""
    from featx.cli.models import load_model
    from featx.cli.requests import inputs_of

    with told(takes_inputs=True):
        check_output(output, (".html", ".svg", ".dot"))
        loaded = load_model(model, pretrained=pretrained, weights=weights, seed=seed)
        with of_model(_named(inputs)):
            drawing = featx.draw(loaded, example_inputs=inputs_of(inputs), depth=depth)
        drawing.save(output)
        typer.echo(f"wrote {output}")


def code(
    model: Model,
    node: Nodes = [],  # noqa: B006 - typer reads it
    output: Annotated[Path | None, typer.Option("--output", "-o", help="A folder, for code with its weights.")] = None,
    inputs: Inputs = [],  # noqa: B006 - typer reads it
    pretrained: Pretrained = False,
    weights: Weights = None,
    seed: Seed = None,
) -> None:
    """Print the generated code of an extractor, or of the whole model; or write code that needs torch alone."""
    from featx.cli.features import make_extractor
    from featx.cli.models import load_model
    from featx.cli.requests import inputs_of

    with told(takes_inputs=True):
        loaded = load_model(model, pretrained=pretrained, weights=weights, seed=seed)
        example = inputs_of(inputs)
        with of_model(_named(inputs)):
            module: Any = (
                make_extractor(loaded, node, None, example) if node else featx.trace(loaded, example_inputs=example)
            )
        if output is None:
            typer.echo(module.code.strip())
        else:
            module.to_folder(output, type(loaded).__name__ + "Features" * bool(node), pickled=False)
            typer.echo(f"wrote {output}")


def features(
    model: Model,
    images: Annotated[list[Path], typer.Argument(metavar="IMAGE...", help="Images, or folders of images.")],
    node: Nodes,
    output: Annotated[Path, typer.Option("--output", "-o", help="A .safetensors or .npz file.")] = Path(
        "features.safetensors"
    ),
    picture: Annotated[Path | None, typer.Option(help="A picture of the maps, by their principal components.")] = None,
    pool: Annotated[Pool | None, typer.Option(help="Reduce the places, or the tokens.")] = None,
    size: Size = None,
    batch: Annotated[int, typer.Option(min=1, help="How many images run at once.")] = 16,
    pretrained: Pretrained = False,
    weights: Weights = None,
    seed: Seed = None,
    as_json: AsJson = False,
) -> None:
    """Compute features of images, and write them as arrays and as a picture."""
    from featx.cli.features import compute_features
    from featx.cli.images import list_images

    with told():
        check_output(output, (".safetensors", ".npz"))
        if picture is not None:
            check_output(picture, PICTURES)
        files = list_images(images)
        found = compute_features(
            model, files, node, pool, size=size, batch=batch, pretrained=pretrained, weights=weights, seed=seed
        )
        found.save(output)
        if picture is not None:
            found.draw(picture)
        if as_json:
            typer.echo(json.dumps({key: list(value.shape) for key, value in found.features.items()}))
        else:
            typer.echo(f"{found.infos}\nwrote {output}")


def make_app() -> typer.Typer:
    """Return the command line with all its commands."""
    app = typer.Typer(
        help="Get any intermediate feature out of a PyTorch model.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(main)
    for command in (nodes, cost, draw, code, features, extract, verify, errors, retry):
        app.command()(command)
    return app


def _named(inputs: list[str]) -> str:
    return f"--input {' --input '.join(inputs)}" if inputs else "inputs that are guessed; give --input"
