"""Write feature maps as a picture."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from featx.drawing.components import principal_components
from featx.features.describing.info import FeatureInfos

_TILE, _GAP = 192, 8


def save_picture(
    path: Path, images: torch.Tensor, features: Mapping[str, torch.Tensor], infos: FeatureInfos
) -> list[str]:
    """Write a picture with a row for each image: the image, and each feature that is a map. Return the drawn keys.

    Nothing is written where none is a map.
    """
    image: Any = importlib.import_module("PIL.Image")
    low, high = images.amin((1, 2, 3), keepdim=True), images.amax((1, 2, 3), keepdim=True)
    columns = [(images - low) / (high - low).clamp(min=1e-12)]
    keys: list[str] = []
    for info in infos:
        value = features[info.key]
        if info.layout == "NHWC":
            value = value.permute(0, 3, 1, 2)
        if info.layout in ("NCHW", "NHWC") and min(value.shape[2:]) > 1:
            columns.append(principal_components(value))
            keys.append(info.key)
    if not keys:
        return []
    wide = _GAP + (_TILE + _GAP) * len(columns)
    canvas = image.new("RGB", (wide, _GAP + (_TILE + _GAP) * len(images)), "white")
    for across, column in enumerate(columns):
        for down, tile in enumerate(column):
            pixels = (tile[:3].permute(1, 2, 0) * 255).round().to(torch.uint8).contiguous()
            drawn = image.frombytes("RGB", (pixels.shape[1], pixels.shape[0]), bytes(pixels.flatten().tolist()))
            canvas.paste(
                drawn.resize((_TILE, _TILE), 0),
                (_GAP + across * (_TILE + _GAP), _GAP + down * (_TILE + _GAP)),
            )
    canvas.save(path)
    return keys
