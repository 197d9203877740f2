"""Inputs for the first layer of a model whose number of channels is known."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from featx.examples.example import Example
from featx.examples.question import Question

_CONVOLUTION_SIZES = {1: (64,), 2: (224, 224), 3: (16, 112, 112)}
# Others that models are made for.
_OTHER_CONVOLUTION_SIZES = {
    1: [(count,) for count in (128, 256, 784, 1024, 1000, 16000)],
    2: [(side, side) for side in (224, 32, 28, 64, 256, 128, 299, 384, 512, 96, 112, 448)],
    3: [(16, 224, 224), (8, 32, 32), (32, 32, 32), (64, 64, 64), (96, 96, 96), (8, 224, 224)],
}
_OTHER_LENGTHS = (16, 8, 4)
_NORM_SIZES = {nn.BatchNorm1d: (), nn.BatchNorm2d: (32, 32), nn.BatchNorm3d: (8, 16, 16)}


def from_layer(ask: Question) -> Example | None:
    """Return one input for the first layer, in the order of registration, that says what it takes."""
    return next(guesses_from_layer(ask), None)


def guesses_from_layer(ask: Question) -> Iterator[Example]:
    """Yield inputs for that layer: of the likeliest form, then of other sizes and with another dimension."""
    names = ask.required
    if len(names) != 1 or ask.parameters[names[0]].kind is inspect.Parameter.KEYWORD_ONLY:
        return
    if hasattr(ask.model, "main_input_name"):  # parts of transformers models take what their first layer does not
        return
    for layer in ask.model.modules():
        inputs = _inputs_of(layer, ask)
        if inputs is not None:
            yield from (Example((value,), {}, f"the first {type(layer).__name__}") for value in inputs)
            return


def _inputs_of(layer: nn.Module, ask: Question) -> Iterator[Tensor] | None:
    """Return what a layer may take, the likeliest first; None for one that does not say how many channels it has."""
    if isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) and layer.in_channels:
        count = len(layer.kernel_size)
        first = _declared_size(ask.model, layer, count)
        sizes = [first, *(size for size in _OTHER_CONVOLUTION_SIZES[count] if size != first)]
        forms = [(layer.in_channels, *size) for size in sizes]
        if count == 2:  # blocks of 2 x 2 or 4 x 4 pixels may be folded into channels, as by nn.PixelUnshuffle
            forms += [(layer.in_channels // of, *first) for of in (4, 16) if layer.in_channels in (of, 3 * of)]
        return (ask.floats(2, *form) for form in forms)
    if isinstance(layer, nn.Linear) and layer.in_features:
        return (ask.floats(2, *length, layer.in_features) for length in _with_and_without_length())
    if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)):
        return (ask.integers(layer.num_embeddings, 2, length) for length in _OTHER_LENGTHS)
    if isinstance(layer, nn.RNNBase):
        return iter([ask.floats(*((2, 5) if layer.batch_first else (5, 2)), layer.input_size)])
    for kind, size in _NORM_SIZES.items():
        if isinstance(layer, kind) and layer.num_features:
            return iter([ask.floats(2, layer.num_features, *size)])
    if isinstance(layer, nn.LayerNorm):
        return (ask.floats(2, *length, *layer.normalized_shape) for length in _with_and_without_length())
    return _images_of(layer, ask)


def _with_and_without_length() -> list[tuple[int, ...]]:
    return [(), *((length,) for length in _OTHER_LENGTHS)]


def _images_of(layer: nn.Module, ask: Question) -> Iterator[Tensor] | None:
    """Return images for a layer of einops that cuts them into patches, as the models of vit-pytorch begin."""
    pattern, lengths = str(getattr(layer, "pattern", "")), dict[str, int](getattr(layer, "axes_lengths", {}))
    if (
        type(layer).__name__ != "Rearrange"
        or not pattern.startswith("b c (h p1) (w p2)")
        or not {"p1", "p2"} <= {*lengths}
    ):
        return None
    layers = (each for each in ask.model.modules() if isinstance(each, (nn.Linear, nn.LayerNorm)))
    embedding = next(layers, None)
    if embedding is None:
        return None
    features = embedding.in_features if isinstance(embedding, nn.Linear) else math.prod(embedding.normalized_shape)
    channels = features // (lengths["p1"] * lengths["p2"])
    sides = [_side_by_positions(ask.model, lengths["p1"]), 224, 256, 64, 32]
    return (ask.floats(2, channels, side, side) for side in sides if side is not None)


def _side_by_positions(model: nn.Module, patch: int) -> int | None:
    """Return the side of the square images for which a model has embeddings of the positions of its patches."""
    for path, parameter in model.named_parameters():
        name = path.rpartition(".")[2]
        if name.startswith("pos") and "bias" not in name and parameter.dim() > 1:
            for others in range(3):  # a class token, a token for distillation
                side = math.isqrt(max(parameter.shape[-2] - others, 0))
                if side > 1 and side * side == parameter.shape[-2] - others:
                    return side * patch
    return None


def _declared_size(model: nn.Module, layer: Any, dimensions: int) -> tuple[int, ...]:
    """Return the size that a model, or one inside it, was built for, as far as that is known, or else a usual one."""
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
    if dimensions == 2 and layer.kernel_size == layer.stride and layer.stride[0] == layer.stride[1] > 1:  # patches
        side = _side_by_positions(model, layer.stride[0])
        if side is not None:
            return side, side
    return _CONVOLUTION_SIZES[dimensions]
