"""Arguments and options that several commands have. Nothing here needs torch."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

FORMS = "torchvision:resnet50, timm:vit_small_patch16_224, hf:FOLDER-or-name, package.module:function"
# What a command says that has made random weights on its own.
RANDOM_WEIGHTS = "weights: random, seed 0; --pretrained loads trained ones, --weights those of a file"
# How the names of pictures may end.
PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".tif", ".pdf")

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
