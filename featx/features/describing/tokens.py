"""Tokens of an image: which of them stand for patches, and how many stand before those."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn

from featx.ir.form import computed_from_inputs
from featx.ir.graph import Graph
from featx.ir.node import Node

# What models call the parameters that they put before the tokens of patches, in this order.
_PREFIXES = tuple(
    re.compile(pattern)
    for pattern in (
        r"(cls_token|class_token|class_embedding)_?\d*",
        r"dist(illation)?_token",
        r"(reg|register|storage)_?tokens?",
    )
)
# How many class, distillation and register tokens a model may have. More are patches of another size, or queries.
_MOST_OTHERS = 16


# The stride of places of an image: one number, or one for each dimension where they differ.
Stride = int | tuple[int, ...]


class ImageTokens:
    """Says which tokens of a model stand for patches of an image or a video.

    How many others stand before them is what the model declares, or its class, distillation and register tokens, or
    what the graph shows: it concatenates them with as many tokens as there are patches, or weights with what is
    computed from the inputs. It is never guessed from the number of tokens: 32 queries of a model are no 16 patches
    with 16 others.
    """

    def __init__(self, model: nn.Module, graph: Graph | None, sizes: tuple[int, ...]) -> None:
        self._sizes = sizes
        self._grids = _grids_of_embeddings(model, sizes)
        self._weights = {name.rpartition(".")[2]: weight for name, weight in model.named_parameters()}
        self._prefixes = _declared_prefixes(model, self._weights)
        self._concatenated = {} if graph is None else self._from_concatenations(graph)

    @functools.cached_property
    def may_have_class_token(self) -> bool:
        """Whether the first of the tokens before the patches may be a class token: not if all are registers."""
        classes, _, registers = (any(map(pattern.fullmatch, self._weights)) for pattern in _PREFIXES)
        return classes or not registers

    def patches(self, shape: tuple[int, ...]) -> tuple[Stride | None, int] | None:
        """Return the stride of the patches of tokens, and how many tokens are none; None where they are no patches.

        The stride is None where their places are not known.
        """
        if len(shape) != 3:
            return None
        if shape[1] in self._concatenated:
            return self._concatenated[shape[1]]
        for prefix in self._prefixes:
            stride = self._stride(shape[1] - prefix)
            if stride is not None:
                return stride, prefix
        return None

    def _stride(self, tokens: int) -> Stride | None:
        """Return the stride of the patches of which the image has so many."""
        if 0 in self._sizes or tokens < 1:
            return None
        embedded = next((stride for stride, places in self._grids if math.prod(places) == tokens), None)
        if embedded is not None or len(self._sizes) != 2:
            return embedded
        pixels = math.prod(self._sizes)
        side = math.isqrt(pixels // tokens)
        is_whole = side > 0 and side * side * tokens == pixels and all(size % side == 0 for size in self._sizes)
        return side if is_whole else None

    def stride_of_places(self, places: tuple[int, ...]) -> Stride | None:
        """Return the stride of the patches of which a map has so many along each dimension."""
        return next((stride for stride, found in self._grids if found == places), None)

    def _from_concatenations(self, graph: Graph) -> dict[int, tuple[Stride | None, int] | None]:
        """Return what `patches` says, by the number of tokens: None where others stand after those of patches."""
        found: dict[int, tuple[Stride | None, int] | None] = {}
        joined = [_parts_and_lengths(node) for node in graph.find_nodes(op="call_function", target=torch.cat)]
        from_inputs = computed_from_inputs(graph) if any(len(parts) > 1 for parts, _ in joined) else set[Node]()
        for parts, lengths in joined:
            most, total = max(lengths, default=0), sum(lengths)
            if most == total:
                continue
            stride = self._stride(most) if total - most <= min(_MOST_OTHERS, most) else None
            if stride is not None:
                found[total] = (stride, total - most) if lengths[-1] == most else None
            elif [part in from_inputs for part in parts] == [False] * (len(parts) - 1) + [True]:
                found[total] = (self._stride(lengths[-1]), total - lengths[-1])
        return found


def _parts_and_lengths(node: Node) -> tuple[list[Node], list[int]]:
    """Return the sequences of tokens that a call concatenates, if it does that, and their lengths."""
    given = dict(enumerate(node.args)) | dict(node.kwargs)
    dim, parts = given.get("dim", given.get(1, 0)), given.get("tensors", given.get(0))
    if dim not in (1, -2) or not isinstance(parts, (tuple, list)):
        return [], []
    found: list[Node] = []
    for part in cast("Sequence[Any]", parts):
        if not isinstance(part, Node) or len(part.meta.get("shape", ())) != 3:
            return [], []
        found.append(part)
    return found, [part.meta["shape"][1] for part in found]


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


def _grids_of_embeddings(model: nn.Module, sizes: tuple[int, ...]) -> list[tuple[Stride, tuple[int, ...]]]:
    """Return the strides of the convolutions that make tokens of patches, and how many places each has in an image."""
    grids: dict[Stride, tuple[int, ...]] = {}
    for layer in model.modules():
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
