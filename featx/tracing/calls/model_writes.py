"""Writes of a trace for real: into tensors of the model, which it must not touch, and into its copies of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from featx.ir.memory import memory_of
from featx.tracing.recording.recorder import Recorder
from featx.tracing.side_effects.foreign_tensors import ForeignTensors
from featx.tracing.signals import WritesSharedTensor


class ModelWrites:
    """Takes the kernels of a trace for real that are about to write tensors.

    Args:
        recorder: is told what is written.
        shared: the memory of the model.
        held: that of the tensors of the replica, which has copies of some, by their paths.
        foreign: saves what is written and belongs to neither, nor was made in the run.
    """

    def __init__(
        self, recorder: Recorder, shared: frozenset[int], held: Mapping[str, int], foreign: ForeignTensors
    ) -> None:
        # The memory that kernels have written, again for each of them.
        self._written: list[int] = []
        self._held = held
        self._recorder = recorder
        self._foreign = foreign
        self._shared = shared
        self._copied = set(held.values()) - shared

    def refuse_shared(self, tensor: torch.Tensor) -> None:
        """Raise where a tensor that may be changed by other means than a kernel is one that the replica shares.

        Raises:
            WritesSharedTensor: it is.
        """
        if memory_of(tensor) in self._shared:
            raise WritesSharedTensor

    def on_write(self, kernel: Any, tensors: list[torch.Tensor]) -> None:
        """Take note that a kernel is about to write tensors.

        Raises:
            WritesSharedTensor: one of them is a tensor of the model that the replica shares.
        """
        recorder = self._recorder
        memories = set(map(memory_of, tensors))
        if "_foreach_" in kernel._schema.name:  # under a dispatch mode, its writes make no new versions
            recorder.write_log.untracked_memory |= memories
            recorder.opaque_call.note_untracked_write()
        if not memories.isdisjoint(self._shared):
            raise WritesSharedTensor
        self._foreign.save(tensors)
        self._foreign.recent.save(tensors)
        self._written += memories
        if not memories.isdisjoint(self._copied):
            recorder.opaque_call.note_model_write(memories & self._copied)

    def counts(self) -> dict[str, int]:
        """Return how many kernels have written the memory of each tensor of the replica, by path. O(tensors)."""
        counts = Counter(self._written)
        return {path: counts[memory] for path, memory in self._held.items()}

    def mark(self) -> int:
        """Return what `forget` needs to take back everything from now on."""
        return len(self._written)

    def forget(self, mark: int) -> None:
        """Take back what was counted since `mark`."""
        del self._written[mark:]
