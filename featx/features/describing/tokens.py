"""Tokens of an image: which of them stand for patches, and how many stand before those."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn

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


class ImageTokens:
    """Says which tokens of a model stand for patches of an image of two dimensions.

    How many others stand before them is what the model declares, or its class, distillation and register tokens, or
    what the graph shows: it concatenates them with as many tokens as there are patches. It is never guessed from the
    number of tokens: 32 queries of a model are no 16 patches with 16 others.
    """

    def __init__(self, model: nn.Module, graph: Graph | None, sizes: tuple[int, ...]) -> None:
        self._sizes = sizes
        self._sides = _sides_of_embeddings(model)
        self._prefixes = _declared_prefixes(model)
        self._concatenated = {} if graph is None else self._from_concatenations(graph)

    def patches(self, shape: tuple[int, ...]) -> tuple[int, int] | None:
        """Return the side of the patches of tokens, and how many tokens are none; None where they are no patches."""
        if len(shape) != 3:
            return None
        if shape[1] in self._concatenated:
            return self._concatenated[shape[1]]
        for prefix in self._prefixes:
            side = self._side(shape[1] - prefix)
            if side is not None:
                return side, prefix
        return None

    def _side(self, tokens: int) -> int | None:
        """Return the side of the square patches of which the image has so many."""
        if len(self._sizes) != 2 or 0 in self._sizes or tokens < 1:
            return None
        pixels = math.prod(self._sizes)
        side = math.isqrt(pixels // tokens)
        is_whole = side > 0 and side * side * tokens == pixels and all(size % side == 0 for size in self._sizes)
        return side if is_whole else self._side_of_embedding(tokens)

    def _side_of_embedding(self, tokens: int) -> int | None:
        fitting = (side for side in self._sides if math.prod(size // side for size in self._sizes) == tokens)
        return next(fitting, None)

    def side_of_places(self, places: tuple[int, ...]) -> int | None:
        """Return the side of the patches of which a map has so many along each dimension, at most cut at the edges."""
        fitting = (side for side in self._sides if tuple(size // side for size in self._sizes) == places)
        return next(fitting, None)

    def _from_concatenations(self, graph: Graph) -> dict[int, tuple[int, int] | None]:
        """Return what `patches` says, by the number of tokens: None where others stand after those of patches."""
        found: dict[int, tuple[int, int] | None] = {}
        for node in graph.find_nodes(op="call_function", target=torch.cat):
            lengths = _lengths_of_parts(node)
            most = max(lengths, default=0)
            side = self._side(most)
            if side is not None and 0 < sum(lengths) - most <= min(_MOST_OTHERS, most):
                found[sum(lengths)] = (side, sum(lengths) - most) if lengths[-1] == most else None
        return found


def _lengths_of_parts(node: Node) -> list[int]:
    """Return the lengths of the sequences of tokens that a call concatenates, if it does that."""
    given = dict(enumerate(node.args)) | dict(node.kwargs)
    dim, parts = given.get("dim", given.get(1, 0)), given.get("tensors", given.get(0))
    if dim not in (1, -2) or not isinstance(parts, (tuple, list)):
        return []
    shapes: list[tuple[int, ...]] = []
    for part in cast("Sequence[Any]", parts):
        shape = part.meta.get("shape") if isinstance(part, Node) else None
        if shape is None or len(shape) != 3:
            return []
        shapes.append(shape)
    return [shape[1] for shape in shapes]


def _declared_prefixes(model: nn.Module) -> tuple[int, ...]:
    """Return how many tokens may stand before those of patches: what the model declares, or what its weights say."""
    declared = getattr(model, "num_prefix_tokens", None)  # of timm
    if type(declared) is int:
        return tuple(sorted({0, declared}))
    named = {name.rpartition(".")[2]: weight for name, weight in model.named_parameters()}
    counts = [0]
    for pattern in _PREFIXES:
        weight = next((weight for name, weight in named.items() if pattern.fullmatch(name)), None)
        if weight is not None:
            counts.append(counts[-1] + (int(weight.shape[-2]) if weight.ndim > 1 else 1))
    return tuple(counts)


def _sides_of_embeddings(model: nn.Module) -> tuple[int, ...]:
    """Return the sides of the patches that convolutions make tokens of; edges that make no whole patch are left out."""
    layers = [module for module in model.modules() if isinstance(module, nn.Conv2d) and _is_embedding(module)]
    return tuple(dict.fromkeys(layer.kernel_size[0] for layer in layers))


def _is_embedding(layer: nn.Conv2d) -> bool:
    is_of_patches = layer.kernel_size == layer.stride and len(set(layer.kernel_size)) == 1 and layer.kernel_size[0] > 4
    return is_of_patches and layer.padding in ((0, 0), "valid")
