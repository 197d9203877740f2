"""Show feature maps as pictures: their first three principal components as red, green and blue."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from featx.features.info import FeatureInfos

_TILE, _GAP = 192, 8


def principal_components(maps: torch.Tensor, count: int = 3) -> torch.Tensor:
    """Return the first principal components of the channels of maps, scaled to 0 to 1.

    Args:
        maps: of shape (N, C, H, W).
        count: how many; where there are fewer channels, the rest is 0.

    Returns:
        A tensor of shape (N, count, H, W). The components are those of all places of all maps together.
    """
    samples, channels, height, width = maps.shape
    values = maps.float().permute(0, 2, 3, 1).reshape(-1, channels)
    values = values - values.mean(0)
    kept = min(count, *values.shape)
    left, sizes, _ = torch.linalg.svd(values, full_matrices=False)
    found = torch.zeros(len(values), count)
    found[:, :kept] = left[:, :kept] * sizes[:kept]
    low, high = found.amin(0), found.amax(0)
    scaled = (found - low) / (high - low).clamp(min=1e-12)
    return scaled.reshape(samples, height, width, count).permute(0, 3, 1, 2)


def save_picture(
    path: Path, images: torch.Tensor, features: Mapping[str, torch.Tensor], infos: FeatureInfos
) -> list[str]:
    """Write a picture with a row for each image: the image, and each feature that is a map. Return the drawn keys."""
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
