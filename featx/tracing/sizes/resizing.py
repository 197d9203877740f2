"""The inputs of a model at other sizes than those of its example."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from itertools import chain, combinations
from typing import Any

import torch

from featx.tracing.example.trace_request import TraceRequest
from featx.tracing.objects.structure import Path, copy_structure
from featx.tracing.stand_ins.stand_ins import keeps_values

# A dimension of an input: the id of the tensor, and the position.
Dim = tuple[int, int]
# From a position, the size there, and the number of the group, to the size to try.
OtherSize = Callable[[int, int, int], int]


def other_size(dim: int, size: int, number: int) -> int:
    """Return the size that is tried first."""
    # Far enough away that an integer division of it changes too, and a multiple: many models need one.
    return 2 * size + 1 if dim == 0 else size * (2 + number % 3)


def twice(dim: int, size: int, number: int) -> int:
    """Return a size that more models take together with others than the first one."""
    return 2 * size + 1 if dim == 0 else 2 * size


def other_size_for_real(dim: int, size: int, number: int, more: int = 1) -> int:
    """Return the size for a run for real."""
    # What is computed for real takes not much longer than at the size of the example.
    if dim == 0:
        return size + more
    return size // 2 if number % 2 and size > 1 else 3 * size


# Two samples of half the height have as many elements as one sample, and three have not.
OTHER_SIZES_FOR_REAL: tuple[OtherSize, ...] = (other_size_for_real, partial(other_size_for_real, more=2))


def resized(request: TraceRequest, changes: Mapping[Dim, int], has_values: bool) -> TraceRequest:
    """Return the request on inputs of other sizes."""
    known: dict[int, torch.Tensor] = {}  # one tensor may be two inputs

    def resize(leaf: Any, path: Path) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) not in known:
            known[id(leaf)] = _resized_tensor(leaf, changes, has_values)
        return known[id(leaf)]

    return request.on(*copy_structure((request.args, dict(request.kwargs)), resize))


def _resized_tensor(value: torch.Tensor, changes: Mapping[Dim, int], has_values: bool) -> torch.Tensor:
    shape = [changes.get((id(value), dim), size) for dim, size in enumerate(value.shape)]
    if not has_values and not keeps_values(value, shape):
        return value.new_empty(shape)
    if value.layout is torch.sparse_coo:
        return _resized_sparse(value.coalesce(), shape)
    for dim, (size, wanted) in enumerate(zip(value.shape, shape, strict=True)):
        if wanted != size:
            # The values repeat, so that what depends on them stays likely to go the same way.
            value = value.repeat_interleave(-(-wanted // max(size, 1)), dim).narrow(dim, 0, wanted)
    return value


def _resized_sparse(value: torch.Tensor, shape: list[int]) -> torch.Tensor:
    indices = value.indices()
    are_inside = (indices < indices.new_tensor(shape)[:, None]).all(0)
    return torch.sparse_coo_tensor(indices[:, are_inside], value.values()[are_inside], shape, check_invariants=True)


def can_be_resized(tensor: torch.Tensor) -> bool:
    """Say whether other sizes of an input can be tried."""
    return tensor.layout is torch.strided or (tensor.layout is torch.sparse_coo and tensor.dense_dim() == 0)


def has_equal_products(tensor: torch.Tensor, changes: Mapping[Dim, int]) -> bool:
    """Say whether several dimensions, some of which change, have as many elements together as before.

    What Python makes of a number of pixels or tokens would seem to be a constant then.
    """
    pairs = [(size, changes.get((id(tensor), dim), size)) for dim, size in enumerate(tensor.shape)]
    subsets = chain.from_iterable(combinations(pairs, count) for count in range(2, len(pairs) + 1))
    return any(
        any(before != now for before, now in subset)
        and math.prod(before for before, _ in subset) == math.prod(now for _, now in subset) != 0
        for subset in subsets
    )
