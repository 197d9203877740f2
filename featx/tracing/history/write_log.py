"""Note which tensors a trace has seen, to tell which of them were written afterwards."""

from __future__ import annotations

from collections.abc import Callable

import torch

from featx.ir.memory import memory_of
from featx.ir.node import Node


class WriteLog:
    """The versions of the tensors that nodes gave, and the memory of all tensors that are followed.

    Args:
        version_of: gives a number that changes where a tensor is written.

    Attributes:
        memories: the tensors that are followed, with their memory.
        untracked_memory: memory that may be written without a new version.
    """

    def __init__(self, version_of: Callable[[torch.Tensor], int]) -> None:
        self._version_of = version_of
        self.memories: list[tuple[torch.Tensor, int]] = []
        self.untracked_memory: set[int] = set()
        # The tensors that nodes gave, with the version that they had then.
        self._versions: list[tuple[Node, torch.Tensor, int]] = []

    def note_result(self, node: Node, tensor: torch.Tensor) -> None:
        """Note the version of the tensor that a node gave."""
        if not tensor.is_inference():
            self._versions.append((node, tensor, self._version_of(tensor)))

    def note_memory(self, tensor: torch.Tensor) -> None:
        """Note the memory of a tensor that is followed from now on."""
        self.memories.append((tensor, memory_of(tensor)))

    def mark_overwritten(self) -> None:
        """Mark the nodes whose tensors were written after the nodes gave them, at the end of the trace."""
        for node, tensor, version in self._versions:
            node.meta["is_overwritten"] = self._is_written(tensor, version)

    def has_written_inputs(self) -> bool:
        """Say whether an input was written since forward got it."""
        return any(
            self._is_written(tensor, version) for node, tensor, version in self._versions if node.op == "placeholder"
        )

    def mark(self) -> tuple[int, int]:
        """Return what `forget` needs to take back everything from now on."""
        return len(self._versions), len(self.memories)

    def forget(self, mark: tuple[int, int]) -> None:
        """Take back what was noted since `mark`; memory that may be written stays so."""
        versions, memories = mark
        del self._versions[versions:], self.memories[memories:]

    def release(self) -> None:
        """Drop all tensors."""
        self._versions, self.memories = [], []

    def _is_written(self, tensor: torch.Tensor, version: int) -> bool:
        return self._version_of(tensor) != version or memory_of(tensor) in self.untracked_memory
