"""Tensors that a graph returns although later code may write them: what that code gets in their place.

Gradients of later values flow through a returned tensor if later code gets a clone of it. That is wrong where the
tensor is memory of another one that later code uses too, as a module may return its input for some inputs.
"""

from __future__ import annotations

import torch

from featx.ir.memory import memory_of
from featx.tree import clone_tensors, tensors_in


def later_of(value: torch.Tensor, others: list[torch.Tensor]) -> torch.Tensor:
    """Return what later code gets for a value: a clone, or the value itself if it shares memory with `others`.

    Code that is compiled or exported does not know what shares memory, and gets the value itself. All of them may be
    tensors or nested values; TorchScript knows tensors alone.
    """
    if torch.jit.is_scripting():  # pyright: ignore[reportPrivateImportUsage]
        return value
    else:  # noqa: RET505 - TorchScript reads what is after an `if` that returns
        return value if _may_share_memory(value, others) else clone_tensors(value)


def returned_of(value: torch.Tensor, later: torch.Tensor) -> torch.Tensor:
    """Return a value as it is where later code has got a clone, else a clone of it."""
    if torch.jit.is_scripting():  # pyright: ignore[reportPrivateImportUsage]
        return clone_tensors(value)
    else:  # noqa: RET505
        return clone_tensors(value) if later is value else value


def _may_share_memory(value: torch.Tensor, others: list[torch.Tensor]) -> bool:
    if torch.compiler.is_compiling() or torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage]
        return True
    with torch._C.DisableTorchFunction():
        memories = set(map(memory_of, tensors_in(others)))
        return not memories.isdisjoint(map(memory_of, tensors_in(value)))
