"""What the tests of bulk extraction share: a small model, and photos of every kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn


class Net(nn.Module):
    """A small network for images of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, 2)
        self.norm = nn.BatchNorm2d(4)
        self.fc = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.norm(self.conv(x)).relu().mean((2, 3)))


def pixels(image: Any) -> torch.Tensor:
    """The first 16 x 16 pixels of an image, as numbers from 0 to 1."""
    return torch.from_numpy(np.asarray(image)[:16, :16].copy()).permute(2, 0, 1).float() / 255


def make_net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


def make_photos(folder: Path, count: int) -> list[str]:
    """Write images of noise, some below the folder, and return their keys in order."""
    (folder / "more").mkdir(parents=True)
    draw = np.random.default_rng(0)
    keys: list[str] = []
    for number in range(count):
        key = f"more/{number:03d}.png" if number % 3 == 0 else f"{number:03d}.png"
        Image.fromarray(draw.integers(0, 255, (18, 20, 3), dtype=np.uint8)).save(folder / key)
        keys.append(key)
    return sorted(keys)


def expected(net: nn.Module, folder: Path, keys: list[str]) -> torch.Tensor:
    """What the network's last layer gives for photos, one by one."""
    with torch.no_grad():
        return torch.cat([net(pixels(Image.open(folder / key).convert("RGB"))[None]) for key in keys])


@pytest.fixture
def net() -> Net:
    return make_net()


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    make_photos(folder, 20)
    return folder
