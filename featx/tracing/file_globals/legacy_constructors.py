"""The constructors of early versions of torch, such as `torch.FloatTensor(2, 3)`: no mode of torch sees their calls.

What they make of traced numbers, a function of torch makes in their place.
"""

from __future__ import annotations

import ast
from types import FrameType
from typing import Any

import torch

from featx.tracing.guards.scalars import TracedFloat, TracedNumber
from featx.tracing.source.location import node_at, parent_of
from featx.tracing.source_uses.syntax_queries import is_in_try
from featx.tree import tree_leaves

LEGACY_CONSTRUCTORS = frozenset(
    f"{kind}Tensor" for kind in ("", "Float", "Double", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte")
)


def is_called(frame: FrameType) -> bool:
    """Say whether `frame` reads the name of a function now only to call it, and not in a `try`, as its source says.

    What is traced may not fail in a `try`.
    """
    node = node_at(frame)
    parent = None if node is None else parent_of(node, frame)
    return isinstance(parent, ast.Call) and parent.func is node and not is_in_try(frame)


def construct(kind: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a constructor; for traced sizes or numbers `torch.empty` or `torch.tensor`, which do the same."""
    leaves = list(tree_leaves(args))
    is_of_numbers = all(type(each) in (int, float) or isinstance(each, TracedNumber) for each in leaves)
    if kwargs or not is_of_numbers or not any(isinstance(each, TracedNumber) for each in leaves):
        return kind(*args, **kwargs)
    dtype = torch.get_default_dtype() if kind is torch.Tensor else kind.dtype
    sizes = args[0] if len(args) == 1 and isinstance(args[0], torch.Size) else args
    if not any(isinstance(each, (tuple, list)) for each in sizes):
        return torch.empty(tuple(sizes), dtype=dtype, device="cpu")
    has_floats = any(isinstance(each, (float, TracedFloat)) for each in leaves)
    if len(args) == 1 and (dtype.is_floating_point or not has_floats):
        return torch.tensor(args[0], dtype=dtype, device="cpu")
    return kind(*args)
