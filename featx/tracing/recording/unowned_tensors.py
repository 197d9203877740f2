"""Tensors that neither the model nor the trace has: constants of the graph, or refused."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch._C._functorch import is_functorch_wrapped_tensor

from featx.ir.memory import memory_of
from featx.tracing.objects.module_parts import tensors_of
from featx.tracing.replica.replica import Replica
from featx.tracing.signals import Untraceable


def constant_of(
    tensor: torch.Tensor, replica: Replica, followed: Iterable[torch.Tensor], *, is_unseen: bool
) -> torch.Tensor:
    """Return what is in the graph for a tensor that no node gives and that the model does not own.

    Args:
        tensor: the tensor.
        replica: the copy of the model that runs.
        followed: the tensors that nodes give.
        is_unseen: whether the tensor is of the trace although no recorded call returned it.

    Raises:
        Untraceable: it is no constant.
    """
    if isinstance(tensor, nn.Parameter):
        raise Untraceable(
            f"a parameter of shape {tuple(tensor.shape)} that the model does not own is used",
            advice="register the module that has it: as an attribute, or in an nn.ModuleList in place of a list",
        )
    if is_functorch_wrapped_tensor(tensor):
        raise Untraceable("a function of torch.func (vmap, grad) calls torch")
    if is_unseen:
        raise Untraceable("forward uses a tensor that no traced operation returned")
    if _shares_memory(tensor, followed, replica):
        raise Untraceable("forward uses a tensor that shares the storage of another one, and is no result of it,")
    return replica.original_of(tensor)  # where a trace for real has a copy of it


def source_of_parameter(tensor: torch.Tensor, memories: Iterable[tuple[torch.Tensor, int]]) -> torch.Tensor | None:
    """Return the followed tensor of which forward has made a parameter, as a layer does that it makes; else None.

    Args:
        tensor: one that no node gives and that the model does not own.
        memories: the followed tensors with their memory.
    """
    if not isinstance(tensor, nn.Parameter) or tensor.layout is not torch.strided:
        return None
    memory = memory_of(tensor)
    return next((each for each, of_each in memories if of_each == memory and _has_form_of(each, tensor)), None)


def _has_form_of(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.layout is not torch.strided or one.dtype != other.dtype:
        return False
    of_one, of_other = ([*each.shape, *each.stride(), each.storage_offset()] for each in (one, other))
    return of_one == of_other


def _shares_memory(tensor: torch.Tensor, followed: Iterable[torch.Tensor], replica: Replica) -> bool:
    """Say whether a tensor that is not followed has the memory of one that is, and that is not of the model.

    As what `from_dlpack(to_dlpack(x))` returns, which has a storage of its own.
    """
    address = _address_of(tensor)
    if not address or not any(address in _addresses_of(each) for each in followed):
        return False
    held = (each for module in replica.paths for _, each in tensors_of(module))
    return not any(address in _addresses_of(each) for each in held)


def _address_of(tensor: torch.Tensor) -> int:
    """Return where the memory of a tensor begins; 0 where it has none, or none of its own."""
    is_plain = tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_meta
    return tensor.untyped_storage().data_ptr() if is_plain else 0


def _addresses_of(tensor: torch.Tensor) -> range:
    start = _address_of(tensor)
    return range(start, start + tensor.untyped_storage().nbytes()) if start else range(0)
