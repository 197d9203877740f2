"""Options that several commands have, and what is made of them."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import torch
import typer

from featx.cli.errors import UserError
from featx.cli.models import FORMS
from featx.features.requests.feature import Feature

Model = Annotated[str, typer.Argument(metavar="MODEL", help=FORMS)]
Pretrained = Annotated[bool, typer.Option("--pretrained", help="Load the weights that the library offers.")]
Weights = Annotated[Path | None, typer.Option(metavar="FILE", help="A state dict, of safetensors or torch.")]
Seed = Annotated[int | None, typer.Option(metavar="N", help="The seed of random weights.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Nodes = Annotated[
    list[str],
    typer.Option("--nodes", "-n", metavar="NAME", help="A node or a pattern, as NAME or NAME=KEY; several times."),
]
Size = Annotated[int | None, typer.Option(min=1, help="Height and width of the images.")]
Inputs = Annotated[
    list[str],
    typer.Option(
        "--input",
        metavar="SHAPE",
        help="The shape of an input, as 1x3x64x64, or 2x9:int64 for whole numbers; once for each of them.",
    ),
]
_DTYPES = {
    "": torch.float32, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16,
    "float64": torch.float64, "int64": torch.int64, "int32": torch.int32, "uint8": torch.uint8, "bool": torch.bool,
}  # fmt: skip
# Between names, and not between the characters of a pattern such as layer[3,4].
_COMMA = re.compile(r",(?![^\[]*\])")


def inputs_of(shapes: list[str]) -> tuple[torch.Tensor, ...] | None:
    """Return tensors of these shapes; None where there are none, so that they are guessed.

    Floating-point numbers are random, integers are 0, and booleans True.

    Raises:
        UserError: one is no shape.
    """
    return tuple(map(_input_of, shapes)) or None


def _input_of(text: str) -> torch.Tensor:
    sizes, _, name = text.partition(":")
    dtype = _DTYPES.get(name)
    if dtype is None or not re.fullmatch(r"[1-9]\d*([x,][1-9]\d*)*", sizes):
        raise UserError(
            f"--input is a shape, such as 1x3x64x64, or a shape and one of {', '.join(filter(None, _DTYPES))}, such as "
            f"2x9:int64; got '{text}'"
        )
    shape = [int(size) for size in re.split("[x,]", sizes)]
    if dtype.is_floating_point:
        return torch.rand(shape, dtype=dtype)
    return torch.full(shape, int(dtype is torch.bool), dtype=dtype)


class Pool(StrEnum):
    """How places or tokens are reduced."""

    avg = "avg"
    max = "max"
    gem = "gem"
    cls = "cls"
    last = "last"


class DType(StrEnum):
    """In which type features are written."""

    float16 = "float16"
    float32 = "float32"


def requested(names: list[str], pool: str | None, dtype: str | None = None) -> dict[str, Feature]:
    """Return the request for what was typed: `layer2=C3`, `blocks.*`, or several with commas.

    Raises:
        UserError: a name is empty, or given twice.
    """
    request: dict[str, Feature] = {}
    for each in [part.strip() for text in names for part in _COMMA.split(text)]:
        name, _, key = each.partition("=")
        if not name or name in request:
            raise UserError(f"--nodes has {f'{name} twice' if name else 'an empty name'}: {', '.join(names)}")
        request[name] = Feature(
            key or None, pool=None if pool is None else Pool(pool).value,
            dtype=None if dtype is None else getattr(torch, dtype),
        )  # fmt: skip
    return request
