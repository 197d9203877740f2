"""What is known of a model, whatever is traced of it, to tell what the dimensions of its values mean."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from featx.features.describing.strides import Strides
from featx.ir.modules import walk_modules
from featx.libraries import tokens_are_in_order

# What models call the parameters that they put before the tokens of patches, in this order.
_PREFIXES = tuple(
    re.compile(pattern)
    for pattern in (
        r"(cls_token|class_token|class_embedding)_?\d*",
        r"dist(illation)?_token",
        r"(reg|register|storage)_?tokens?",
    )
)
# The stride of places of an image: one number, or one for each dimension where they differ.
Stride = int | tuple[int, ...]
# Strides of layers that make tokens of patches, and how many places each of them has in an image.
Grids = list[tuple[Stride, tuple[int, ...]]]


class KnownModel:
    """The modules and weights of a model, and what they say of images and tokens. Found when it is asked for.

    Attributes:
        modules: the modules by path.
    """

    def __init__(self, model: nn.Module) -> None:
        self.modules: dict[str, nn.Module] = dict(walk_modules(model))
        self._model = model
        self._grids: dict[tuple[int, ...], Grids] = {}

    @property
    def declared_layout(self) -> Any:
        """The layout that the model says its maps have: "NHWC" of timm's swin; None where it says none."""
        return getattr(self._model, "output_fmt", None)

    @functools.cached_property
    def tokens_are_in_order(self) -> bool:
        """Whether tokens stand in the order of the patches of the image."""
        return tokens_are_in_order(self.modules.values())

    @functools.cached_property
    def strides(self) -> Strides:
        """The strides of its maps."""
        return Strides(self.modules.values())

    @functools.cached_property
    def prefixes(self) -> tuple[int, ...]:
        """How many tokens may stand before those of patches."""
        return _declared_prefixes(self._model, self._weights)

    @functools.cached_property
    def may_have_class_token(self) -> bool:
        """Whether the first of the tokens before the patches may be a class token: not if all are registers."""
        classes, _, registers = (any(map(pattern.fullmatch, self._weights)) for pattern in _PREFIXES)
        return classes or not registers

    def grids(self, sizes: tuple[int, ...]) -> Grids:
        """Return the strides of the layers that make tokens of patches, with their places in an image of this size."""
        if sizes not in self._grids:
            self._grids[sizes] = _grids_of_embeddings(self.modules.values(), sizes)
        return self._grids[sizes]

    @functools.cached_property
    def _weights(self) -> dict[str, torch.Tensor]:
        """The parameters by the last part of their names."""
        named = (item for module in self.modules.values() for item in module._parameters.items())
        return {name: weight for name, weight in named if weight is not None}


def _declared_prefixes(model: nn.Module, weights: Mapping[str, torch.Tensor]) -> tuple[int, ...]:
    """Return how many tokens may stand before those of patches: what the model declares, or what its weights say."""
    declared = getattr(model, "num_prefix_tokens", None)  # of timm
    if type(declared) is int:
        return tuple(sorted({0, declared}))
    counts = [0]
    for pattern in _PREFIXES:
        weight = next((weight for name, weight in weights.items() if pattern.fullmatch(name)), None)
        if weight is not None:
            counts.append(counts[-1] + (int(weight.shape[-2]) if weight.ndim > 1 else 1))
    return tuple(counts)


def _grids_of_embeddings(modules: Iterable[nn.Module], sizes: tuple[int, ...]) -> Grids:
    """Return the strides of the convolutions that make tokens of patches, and how many places each has in an image."""
    grids: dict[Stride, tuple[int, ...]] = {}
    for layer in modules:
        if isinstance(layer, (nn.Conv2d, nn.Conv3d)) and len(layer.stride) == len(sizes) and _is_embedding(layer):
            padding = layer.padding if isinstance(layer.padding, tuple) else (0,) * len(sizes)
            options = zip(sizes, layer.kernel_size, layer.stride, padding, strict=True)
            places = tuple((size + 2 * pad - kernel) // stride + 1 for size, kernel, stride, pad in options)
            stride = layer.stride[0] if len(set(layer.stride)) == 1 else layer.stride
            if min(places) > 0:
                grids.setdefault(stride, places)
    return list(grids.items())


def _is_embedding(layer: nn.Conv2d | nn.Conv3d) -> bool:
    """Say whether a convolution may make patches: large ones, side by side or overlapping by half at most."""
    pairs = list(zip(layer.kernel_size, layer.stride, strict=True))
    is_of_patches = all(stride <= kernel <= 2 * stride for kernel, stride in pairs) and max(layer.kernel_size) > 4
    return is_of_patches and layer.padding != "same" and set(layer.dilation) == {1}
