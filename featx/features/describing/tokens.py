"""Tokens of an image: which of them stand for patches, and how many stand before those."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch

from featx.features.describing.known_model import KnownModel, Stride
from featx.ir.form import computed_from_inputs
from featx.ir.graph import Graph
from featx.ir.node import Node

# How many class, distillation and register tokens a model may have. More are patches of another size, or queries.
_MOST_OTHERS = 16


class ImageTokens:
    """Says which tokens of a model stand for patches of an image or a video.

    How many others stand before them is what the model declares, or its class, distillation and register tokens, or
    what the graph shows: it concatenates them with as many tokens as there are patches, or weights with what is
    computed from the inputs. It is never guessed from the number of tokens: 32 queries of a model are no 16 patches
    with 16 others.

    Args:
        model: the model.
        graph: of what is requested of it; None where it is not known.
        sizes: the sides of the image.
    """

    def __init__(self, model: KnownModel, graph: Graph | None, sizes: tuple[int, ...]) -> None:
        self._sizes = sizes
        self._grids = model.grids(sizes)
        self._prefixes = model.prefixes
        self._concatenated = {} if graph is None else self._from_concatenations(graph)

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
