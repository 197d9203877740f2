"""Send tensors between processes in few pieces: each takes an open file, and systems allow 1,024 of them by default."""

from __future__ import annotations

from typing import Any

import torch

from featx.tree import tensors_in, tree_map


class _Place:  # no dataclass, which would count as structure
    """Where a tensor is in the one of its dtype."""

    def __init__(self, dtype: torch.dtype, start: int, shape: torch.Size) -> None:
        self.dtype, self.start, self.shape = dtype, start, shape


class Packed:
    """Nested values with one tensor for each dtype."""

    def __init__(self, values: Any, tensors: dict[torch.dtype, torch.Tensor]) -> None:
        self.values, self.tensors = values, tensors


def pack(values: Any) -> Packed:
    """Return nested values with the elements of all their tensors in one for each dtype. Copies them."""
    parts: dict[torch.dtype, list[torch.Tensor]] = {}
    sizes: dict[torch.dtype, int] = {}

    def placed(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        start = sizes.get(leaf.dtype, 0)
        sizes[leaf.dtype] = start + leaf.numel()
        parts.setdefault(leaf.dtype, []).append(leaf.flatten())
        return _Place(leaf.dtype, start, leaf.shape)

    places = tree_map(placed, values)
    return Packed(places, {dtype: torch.cat(each) for dtype, each in parts.items()})


def unpack(packed: Packed) -> Any:
    """Return the values, with tensors that share memory."""

    def tensor(leaf: Any) -> Any:
        if not isinstance(leaf, _Place):
            return leaf
        return packed.tensors[leaf.dtype].narrow(0, leaf.start, leaf.shape.numel()).view(leaf.shape)

    return tree_map(tensor, packed.values)


def number_of_tensors(values: Any) -> int:
    """Return how many tensors nested values hold."""
    return len(tensors_in(values))
