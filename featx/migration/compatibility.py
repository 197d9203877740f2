"""Small things that code written for torch.fx calls, and that have nothing to do here."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar, get_args

import torch

_F = TypeVar("_F", bound=Callable[..., Any])

# What a node's argument is, besides nodes and nested tuples, lists, dicts, slices and ranges.
BaseArgumentTypes: TypeAlias = (
    str | int | float | bool | complex | torch.dtype | torch.Tensor | torch.device | torch.memory_format
    | torch.layout | torch._ops.OpOverload | torch.SymInt | torch.SymBool | torch.SymFloat
)  # fmt: skip
BASE_TYPES: tuple[type, ...] = get_args(BaseArgumentTypes)


def compatibility(is_backward_compatible: bool) -> Callable[[_F], _F]:
    """Return a decorator that does nothing; torch.fx keeps a list of its own stable functions with it."""
    return lambda function: function


def preserve_node_meta(enable: bool = True) -> contextlib.AbstractContextManager[None]:
    """Return a context in which Transformer keeps the meta of nodes, as it always does here."""
    return contextlib.nullcontext()
