"""Feature maps as pictures: their first three principal components as red, green and blue."""

from __future__ import annotations

import torch


def principal_components(maps: torch.Tensor, count: int = 3) -> torch.Tensor:
    """Return the first principal components of the channels of maps, scaled to 0 to 1.

    Args:
        maps: of shape (N, C, H, W).
        count: how many; where there are fewer channels, the rest is 0.

    Returns:
        A tensor of shape (N, count, H, W). The components are those of all places of all maps together.
    """
    samples, channels, height, width = maps.shape
    values = maps.detach().float().permute(0, 2, 3, 1).reshape(-1, channels)
    values = values - values.mean(0)
    kept = min(count, *values.shape)
    found = torch.zeros(len(values), count)
    if channels <= len(values):
        _, directions = torch.linalg.eigh(values.mT @ values)
        found[:, :kept] = values @ directions[:, -kept:].flip(1)
    else:  # the smaller matrix, of places by places, has the same components
        sizes, directions = torch.linalg.eigh(values @ values.mT)
        found[:, :kept] = (directions[:, -kept:] * sizes[-kept:].clamp(min=0).sqrt()).flip(1)
    low, high = found.amin(0), found.amax(0)
    scaled = (found - low) / (high - low).clamp(min=1e-12)
    return scaled.reshape(samples, height, width, count).permute(0, 3, 1, 2)
