"""How many bytes an operator reads and writes: each input once and each result once, as a kernel without a cache."""

from __future__ import annotations

from typing import Any

import torch

from featx.ir.overloads import Signature, tensors_among

# Only the form of the input counts.
_UNREAD = frozenset("zeros_like ones_like full_like new_zeros new_ones new_full rand_like randn_like".split())
# The result is a handle on memory that was neither read nor written.
_UNTOUCHED = frozenset(
    "empty empty_like empty_strided empty_permuted new_empty new_empty_strided set_ resize_ resize_as_ _unsafe_view "
    "lift_fresh _reshape_alias record_stream".split()
)
# What is read of the first tensor is as much as there is in the result.
_READ_IN_PART = frozenset("embedding index _unsafe_index index_select gather take masked_select im2col".split())
# What is written is not read before.
_OVERWRITTEN = frozenset(
    "copy_ fill_ zero_ normal_ uniform_ bernoulli_ random_ exponential_ geometric_ cauchy_ log_normal_".split()
)
# What is written is as much as is given, at the position of that argument.
_WRITTEN_IN_PART = {
    "index_put_": 2, "_index_put_impl_": 2, "scatter_": 3, "scatter_add_": 3, "index_add_": 3, "index_copy_": 3,
    "scatter_reduce_": 3, "index_fill_": 2,
}  # fmt: skip


def bytes_moved(signature: Signature, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> tuple[int, int]:
    """Return the bytes that a call reads and writes. O(tensors)."""
    name = signature.name.partition("::")[2]
    if signature.is_view or name in _UNTOUCHED or signature.name.startswith("prim"):
        return 0, 0
    inputs = [*tensors_among(args), *tensors_among(kwargs.values())]
    distinct = {id(tensor): tensor for tensor in inputs}
    targets = {id(tensor): tensor for tensor in signature.targets(args, kwargs)}
    results = {id(tensor): tensor for tensor in tensors_among((result,)) if id(tensor) not in distinct}
    read = sum(bytes_of(tensor) for tensor in distinct.values())
    written = sum(bytes_of(tensor) for tensor in (*results.values(), *targets.values()))
    if name in _READ_IN_PART and inputs and results:
        read += sum(map(bytes_of, results.values())) - bytes_of(inputs[0])
    elif name in _WRITTEN_IN_PART and targets:
        given = next(tensors_among(args[_WRITTEN_IN_PART[name] :]), None)
        if given is not None:
            read -= bytes_of(inputs[0])
            written = given.numel() * inputs[0].element_size()
    elif name in _UNREAD:
        read = 0
    elif name in _OVERWRITTEN or "out" in kwargs:
        read -= sum(map(bytes_of, targets.values()))
    return read, written


def bytes_of(tensor: torch.Tensor) -> int:
    """Return how much memory the elements of a tensor take; those of an expanded dimension lie in one place."""
    if tensor.layout is not torch.strided or not tensor.numel():
        return 0 if not tensor.numel() else tensor.numel() * tensor.element_size()
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if stride:
            count *= size
    return count * tensor.element_size()
