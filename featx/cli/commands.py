"""The commands: each makes a model, asks featx, and prints a table, JSON or code, or writes a file."""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from featx.cli.bulk import errors, extract, retry, verify
from featx.cli.errors import UserError, check_output, of_model, told
from featx.cli.images import find_images
from featx.cli.models import RANDOM_WEIGHTS, load_model
from featx.cli.options import (
    AsJson,
    Inputs,
    Model,
    Nodes,
    Pool,
    Pretrained,
    Seed,
    Size,
    Weights,
    inputs_of,
    requested,
)  # fmt: skip
from featx.cli.pictures import SUFFIXES, save_picture
from featx.drawing.drawing import draw as draw_graph
from featx.examples import find_example
from featx.features.describing.node_rows import nodes as list_nodes
from featx.features.dual import DualGraphModule
from featx.features.extractor import create_feature_extractor
from featx.passes.cost import cost as count_cost
from featx.traced import trace
from featx.tree import tree_leaves


def _tell_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"featx {version('featx')}, torch {torch.__version__}")
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
    depth: Annotated[int | None, typer.Option(help="Fold modules that lie deeper.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Operations, inputs and weights too.")] = False,
    inputs: Inputs = [],  # noqa: B006 - typer reads it
    pretrained: Pretrained = False,
    weights: Weights = None,
    seed: Seed = None,
    as_json: AsJson = False,
) -> None:
    """List the values inside a model, with shapes, strides, parameters and FLOPs."""
    with told():
        loaded = load_model(model, pretrained=pretrained, weights=weights, seed=seed)
        with of_model(_named(inputs)):
            table = list_nodes(loaded, inputs_of(inputs), depth=depth)
        found = table.filter(match, type=type, stride=stride)
        if not found:
            raise UserError("no node is like that; leave out --match, --type or --stride to see all")
        if as_json:
            typer.echo(json.dumps(found.to_dicts()))
        else:
            inside = next((row.name.partition(".")[0] for row in table if "." in row.name), "layer1")
            hint = f"--depth N and --all show them, and --match '{inside}.*' what is like that"
            typer.echo(found.to_text(depth, everything=everything or len(found) < len(table), hint=hint))


def cost(
    model: Model,
    depth: Annotated[int, typer.Option(help="Fold modules that lie deeper.")] = 2,
    inputs: Inputs = [],  # noqa: B006 - typer reads it
    pretrained: Pretrained = False,
    weights: Weights = None,
    seed: Seed = None,
    as_json: AsJson = False,
) -> None:
    """Count parameters, FLOPs, bytes moved and memory of each module."""
    with told():
        loaded = load_model(model, pretrained=pretrained, weights=weights, seed=seed)
        with of_model(_named(inputs)):
            report = count_cost(loaded, example_inputs=inputs_of(inputs), unknown="list")
        if as_json:
            typer.echo(json.dumps([dataclasses.asdict(module) for module in report.modules]))
        else:
            typer.echo(report.module_table(depth))
            typer.echo("\n" + "\n".join(str(report).splitlines()[-2 - len(report.unknown) :]))
            typer.echo(f"for inputs of {_shapes_of(loaded, inputs)}")


def draw(
    model: Model,
    output: Annotated[Path, typer.Option("--output", "-o", help="A .html page, .svg or .dot.")] = Path("model.html"),
    depth: Annotated[int | None, typer.Option(help="How many levels are open.")] = None,
    inputs: Inputs = [],  # noqa: B006 - typer reads it
    pretrained: Pretrained = False,
    weights: Weights = None,
    seed: Seed = None,
) -> None:
    """Draw the graph of a model, folded by its modules, as a page that opens in any browser."""
    with told():
        check_output(output, (".html", ".svg", ".dot"))
        loaded = load_model(model, pretrained=pretrained, weights=weights, seed=seed)
        with of_model(_named(inputs)):
            drawing = draw_graph(loaded, example_inputs=inputs_of(inputs), depth=depth)
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
    with told():
        loaded = load_model(model, pretrained=pretrained, weights=weights, seed=seed)
        example = inputs_of(inputs)
        with of_model(_named(inputs)):
            module: Any = _extractor(loaded, node, None, example) if node else trace(loaded, example_inputs=example)
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
    with told():
        check_output(output, (".safetensors", ".npz"))
        if picture is not None:
            check_output(picture, SUFFIXES)
        is_random = seed is None and weights is None and not pretrained
        loaded = load_model(model, pretrained=pretrained, weights=weights, seed=0 if is_random else seed)
        photos = find_images(images, loaded, size, spec=model)
        with of_model("these images"):
            extractor = _extractor(loaded, node, pool, photos.read(photos.files[:2]))
        batches = photos.read(photos.files)
        typer.echo(f"{len(photos.files)} images: {photos.described}", err=True)
        if is_random:
            typer.echo(RANDOM_WEIGHTS, err=True)
        found = _run(extractor, batches, batch)
        _save(output, found, list(map(str, photos.files)))
        if picture is not None:
            drawn = save_picture(picture, batches, found, extractor.feature_info)
            if not drawn:
                picture.unlink()
                raise UserError(
                    f"--picture shows maps, and none of {', '.join(found)} is one; ask for them without --pool"
                )
            typer.echo(f"wrote {picture}: {', '.join(['the image', *drawn])}", err=True)
        if as_json:
            typer.echo(json.dumps({key: list(value.shape) for key, value in found.items()}))
        else:
            typer.echo(f"{extractor.feature_info}\nwrote {output}")


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


def _extractor(model: Any, names: list[str], pool: Pool | None, example: Any = None) -> DualGraphModule:
    return create_feature_extractor(
        model, requested(names, pool), suppress_diff_warning=True, example_inputs=example, adaptive=None
    )


def _shapes_of(model: Any, inputs: list[str]) -> str:
    example = None if inputs else find_example(model, model.training)
    leaves = inputs_of(inputs) if example is None else tree_leaves((example.args, example.kwargs))
    shapes = ("x".join(map(str, leaf.shape)) for leaf in leaves or () if isinstance(leaf, torch.Tensor))
    return ", ".join(shapes) or "no size"


def _named(inputs: list[str]) -> str:
    return f"--input {' --input '.join(inputs)}" if inputs else "inputs that are guessed; give --input"


def _run(extractor: DualGraphModule, images: torch.Tensor, batch: int) -> dict[str, torch.Tensor]:
    parts: list[dict[str, Any]] = []
    with torch.inference_mode(), typer.progressbar(images.split(batch), label="features", file=sys.stderr) as bar:
        for each in bar:
            with of_model("these images"):
                parts.append(extractor(each))
    not_tensors = [key for key, value in parts[0].items() if not isinstance(value, torch.Tensor)]
    if not_tensors:
        raise UserError(f"'{not_tensors[0]}' is no tensor; name a value inside it")
    return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}


def _save(path: Path, found: dict[str, torch.Tensor], names: list[str]) -> None:
    if path.suffix == ".npz":
        import numpy as np

        arrays: dict[str, Any] = {key: value.numpy() for key, value in found.items()}
        np.savez(path, **arrays, images=np.array(names))
        return
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise UserError("safetensors is not installed: pip install safetensors, or write an .npz file") from error
    tensors = {key: value.contiguous().clone() for key, value in found.items()}
    save_file(tensors, str(path), metadata={"images": json.dumps(names)})
