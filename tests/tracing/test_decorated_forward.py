"""A library whose module has a decorated forward: the functions that its file names are found all the same."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import featx

LIBRARY = """
import torch
from einops import rearrange
from torch import nn


class Rotary(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(4))

    def rotate(self, x):
        return rearrange(self.forward(rearrange(x, "b n (h d) -> b h n d", h=2)), "b h n d -> b n (h d)")

    @torch.autocast("cuda", enabled=False)
    def forward(self, x):
        return rearrange(rearrange(x, "... (d r) -> ... d r", r=2).flip(-1), "... d r -> ... (d r)") * self.scale
"""


@pytest.fixture
def library(tmp_path: Path) -> Iterator[Any]:
    path = tmp_path / "library_of_rotary.py"
    path.write_text(LIBRARY)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules[path.stem]


def test_einops_behind_a_decorated_forward_leaves_sizes_free(library: Any) -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.rotary = nn.Linear(8, 8), library.Rotary()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.rotary.rotate(self.query(x))

    model = Attention().eval()
    extractor = featx.create_feature_extractor(model, ["query", "output"], example_inputs=torch.rand(2, 6, 8))
    for shape in ((1, 6, 8), (3, 9, 8), (2, 4, 8)):
        x = torch.rand(shape)
        assert torch.equal(extractor(x)["output"], model(x))
