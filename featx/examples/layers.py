"""Inputs for the first layer of a model whose number of channels is known."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn

from featx.examples.example import Example
from featx.examples.question import Question

_CONVOLUTION_SIZES = {1: (64,), 2: (224, 224), 3: (16, 112, 112)}
_NORM_SIZES = {nn.BatchNorm1d: (), nn.BatchNorm2d: (32, 32), nn.BatchNorm3d: (8, 16, 16)}


def from_layer(ask: Question) -> Example | None:
    """Return one input for the first layer, in the order of registration, that says what it takes."""
    names = ask.required
    if len(names) != 1 or ask.parameters[names[0]].kind is inspect.Parameter.KEYWORD_ONLY:
        return None
    if hasattr(ask.model, "main_input_name"):  # parts of transformers models take what their first layer does not
        return None
    for layer in ask.model.modules():
        value = _input_of(layer, ask)
        if value is not None:
            return Example((value,), {}, f"the first {type(layer).__name__}")
    return None


def _input_of(layer: nn.Module, ask: Question) -> Tensor | None:
    if isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        size = _declared_size(ask.model, len(layer.kernel_size))
        return ask.floats(2, layer.in_channels, *size) if layer.in_channels else None
    if isinstance(layer, nn.Linear):
        return ask.floats(2, layer.in_features) if layer.in_features else None
    if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)):
        return ask.integers(layer.num_embeddings, 2, 16)
    if isinstance(layer, nn.RNNBase):
        return ask.floats(*((2, 5) if layer.batch_first else (5, 2)), layer.input_size)
    for kind, size in _NORM_SIZES.items():
        if isinstance(layer, kind):
            return ask.floats(2, layer.num_features, *size) if layer.num_features else None
    if isinstance(layer, nn.LayerNorm):
        return ask.floats(2, *layer.normalized_shape)
    return None


def _declared_size(model: nn.Module, dimensions: int) -> tuple[int, ...]:
    """Return the size that a model of torchvision was built for, `model` or one inside it, or else a usual one."""
    for module in model.modules():
        parts: dict[str, Any] = module._modules
        side = vars(module).get("image_size")
        if dimensions == 2 and isinstance(side, int):
            return side, side
        if dimensions == 2 and "Mixed_7c" in parts:  # Inception3: the head for training fits one size only
            return 299, 299
        position, stem = parts.get("pos_encoding"), parts.get("conv_proj")
        if dimensions == 3 and position is not None and isinstance(stem, nn.Conv3d):  # MViT
            grid = (position.temporal_size, *position.spatial_size)
            return tuple(count * stride for count, stride in zip(grid, stem.stride, strict=True))
        if dimensions == 3 and isinstance(module, nn.AvgPool3d):  # S3D: its pool is as large as what is left of 224
            return 16, 224, 224
    return _CONVOLUTION_SIZES[dimensions]
