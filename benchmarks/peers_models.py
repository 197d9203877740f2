"""The small models on which peers_rows.py runs the libraries, with the same weights each time."""

from __future__ import annotations

import time
from typing import Any

import timm
import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as torch's documentation has it


def resnet() -> nn.Module:
    """Return a resnet18 in eval mode, whose weights are always the same."""
    torch.manual_seed(0)
    return torchvision.models.resnet18(weights=None).eval()


def vit(**options: Any) -> nn.Module:
    """Return a small vision transformer of timm."""
    torch.manual_seed(0)
    return timm.create_model("vit_tiny_patch16_224", img_size=32, depth=3, num_classes=5, **options).eval()


def bert() -> nn.Module:
    """Return a small BERT."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
    return BertModel(config).eval()


class Branch(nn.Module):
    """Python decides by a value which layer runs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third, self.last = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Take one of two ways."""
        shared = self.first(x)
        x = self.second(shared) if x.sum() > 0 else self.third(shared)
        return self.last(x)


class Dropper(nn.Module):
    """A dropout that is a function, not a module."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        """Drop all values in train mode, which needs no random numbers."""
        return self.last(F.dropout(self.first(x), 1.0, training=self.training))


class Pause(nn.Module):
    """Let other threads run."""

    def forward(self, x: Tensor) -> Tensor:
        """Sleep."""
        time.sleep(0.002)
        return x
