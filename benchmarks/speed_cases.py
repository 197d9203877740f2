"""The features of benchmarks/speed.py, and how a person cuts each model by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import timm
import torch
import transformers
from torch import Tensor

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """A feature of a model.

    Attributes:
        title: what it is.
        model: in eval mode, with random weights.
        node: the path of the module that returns the feature.
        index: its number among the features of timm, or the hidden states of transformers.
        cut: the model's own code as far as the feature, a function of the model and its input.
        architecture: timm's name; empty for a model of texts.
        device: where the model and its inputs are.
    """

    title: str
    model: Any
    node: str
    index: int
    cut: Callable[[Any, Tensor], Tensor]
    architecture: str = ""
    device: torch.device = _CPU

    def on(self, device: torch.device) -> Case:
        """Return the same on a device; the model is moved."""
        self.model.to(device)
        return replace(self, device=device)

    @property
    def is_text(self) -> bool:
        """Whether the input is indices of tokens."""
        return not self.architecture

    def inputs(self, size: int) -> Tensor:
        """Return a batch."""
        generator = torch.Generator().manual_seed(1)
        if self.is_text:
            return torch.randint(0, 30_000, (size, 128), generator=generator).to(self.device)
        return torch.randn(size, 3, 224, 224, generator=generator).to(self.device)

    def cut_by_hand(self, x: Tensor) -> Tensor:
        """Return the feature."""
        return self.cut(self.model, x)


def _of_timm(title: str, name: str, node: str, index: int, cut: Callable[[Any, Tensor], Tensor]) -> Case:
    torch.manual_seed(0)
    return Case(title, timm.create_model(name).eval(), node, index, cut, name)


def _cut_resnet(m: Any, x: Tensor) -> Tensor:
    return m.layer3(m.layer2(m.layer1(m.maxpool(m.act1(m.bn1(m.conv1(x)))))))


def _cut_convnext(m: Any, x: Tensor) -> Tensor:
    return m.stages[2](m.stages[1](m.stages[0](m.stem(x))))


def _cut_vit(m: Any, x: Tensor) -> Tensor:
    return m.blocks[:6](m.norm_pre(m.patch_drop(m._pos_embed(m.patch_embed(x)))))


def _cut_bert(m: Any, x: Tensor) -> Tensor:
    x = m.embeddings(input_ids=x)
    for layer in m.encoder.layer[:6]:
        x = layer(x)
    return x


def _bert() -> Case:
    torch.manual_seed(0)
    model = transformers.BertModel(transformers.BertConfig()).eval()
    return Case("Layer 6 of 12 of BERT, 128 tokens", model, "encoder.layer.5", 6, _cut_bert)


CASES: dict[str, Callable[[], Case]] = {
    "resnet50": lambda: _of_timm("C4 of timm's resnet50", "resnet50", "layer3", 3, _cut_resnet),
    "convnext": lambda: _of_timm("C4 of timm's convnext_tiny", "convnext_tiny", "stages.2", 2, _cut_convnext),
    "vit": lambda: _of_timm(
        "Block 6 of timm's vit_small_patch16_224", "vit_small_patch16_224", "blocks.5", 5, _cut_vit
    ),
    "bert": _bert,
}
