"""Compute features of a few images at once, and write them as arrays and as a picture."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import typer
from torch import nn

from featx.cli.errors import UserError, of_model
from featx.cli.images import find_images
from featx.cli.models import load_model
from featx.cli.options import RANDOM_WEIGHTS, Pool
from featx.cli.pictures import save_picture
from featx.cli.requests import requested
from featx.features.describing.info import FeatureInfos
from featx.features.dual import DualGraphModule
from featx.features.extractor import create_feature_extractor


@dataclass(frozen=True)
class Computed:
    """Features of images.

    Attributes:
        files: the images.
        images: what the model got of them, one batch.
        features: by their keys, each with the images along its first dimension.
        infos: what each feature is.
    """

    files: Sequence[Path]
    images: torch.Tensor
    features: dict[str, torch.Tensor]
    infos: FeatureInfos

    def save(self, path: Path) -> None:
        """Write them as a .npz or a .safetensors file, with the names of the images.

        Raises:
            UserError: safetensors is not installed.
        """
        names = list(map(str, self.files))
        if path.suffix.lower() == ".npz":
            import numpy as np

            taken = {"file", "allow_pickle", "images"} & self.features.keys()  # what np.savez takes for something else
            if taken:
                raise UserError(f"'{min(taken)}' cannot be a key in an .npz file; choose another one, or .safetensors")
            of_bfloat16 = next((key for key, value in self.features.items() if value.dtype is torch.bfloat16), None)
            if of_bfloat16 is not None:
                raise UserError(f"'{of_bfloat16}' is of bfloat16, which numpy does not have; write a .safetensors file")
            arrays: dict[str, Any] = {key: value.numpy() for key, value in self.features.items()}
            np.savez(path, **arrays, images=np.array(names))
            return
        try:
            from safetensors.torch import save_file
        except ImportError as error:
            raise UserError("safetensors is not installed: pip install safetensors, or write an .npz file") from error
        tensors = {key: value.contiguous().clone() for key, value in self.features.items()}
        try:
            save_file(tensors, str(path), metadata={"images": json.dumps(names)})
        except Exception as error:  # SafetensorError, for whatever the system refuses
            raise UserError(f"'{path}' cannot be written: {error}") from error

    def draw(self, path: Path) -> None:
        """Write a picture of the features that are maps.

        Raises:
            UserError: none is one; no file is written.
        """
        drawn = save_picture(path, self.images, self.features, self.infos)
        if not drawn:
            keys = ", ".join(self.features)
            raise UserError(f"--picture shows maps, and none of {keys} is one; ask for them without --pool")
        typer.echo(f"wrote {path}: {', '.join(['the image', *drawn])}", err=True)


def compute_features(
    spec: str,
    files: Sequence[Path],
    names: list[str],
    pool: Pool | None,
    *,
    size: int | None,
    batch: int,
    pretrained: bool,
    weights: Path | None,
    seed: int | None,
) -> Computed:
    """Return features of some images by the model of `spec`; the rest is what `featx features` takes.

    Random weights have the seed 0. It prints how the images are made, and shows progress.

    Raises:
        UserError: there is no such model or image, or the model fails on the images.
    """
    is_random = seed is None and weights is None and not pretrained
    model = load_model(spec, pretrained=pretrained, weights=weights, seed=0 if is_random else seed)
    photos = find_images(files, model, size, spec=spec)
    with of_model("these images"):
        extractor = make_extractor(model, names, pool, photos.read(files[:2]))
    images = photos.read(files)
    typer.echo(f"{len(files)} images: {photos.described}", err=True)
    if is_random:
        typer.echo(RANDOM_WEIGHTS, err=True)
    return Computed(files, images, _run(extractor, images, batch), extractor.feature_info)


def make_extractor(model: nn.Module, names: list[str], pool: Pool | None, example: Any = None) -> DualGraphModule:
    """Return the extractor for what was typed as `--nodes` and `--pool`."""
    return create_feature_extractor(
        model, requested(names, pool), suppress_diff_warning=True, example_inputs=example, adaptive=None
    )


def _run(extractor: DualGraphModule, images: torch.Tensor, batch: int) -> dict[str, torch.Tensor]:
    parts: list[dict[str, Any]] = []
    with torch.inference_mode(), typer.progressbar(images.split(batch), label="features", file=sys.stderr) as bar:
        for each in bar:
            with of_model("these images"):
                parts.append(extractor(each))
    for part, given in zip(parts, images.split(batch), strict=True):
        for key, value in part.items():
            if not isinstance(value, torch.Tensor):
                raise UserError(f"'{key}' is no tensor; name a value inside it")
            if value.dim() == 0 or len(value) != len(given):
                raise UserError(
                    f"'{key}' has the shape {tuple(value.shape)} for {len(given)} images, and no row for each; ask for "
                    "a value that is computed from the images"
                )
    return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
