"""Put back what a part of a run has written into tensors that were there before that part."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from featx.ir.memory import memory_of


class _Level(NamedTuple):
    """What has happened since one mark: memory that was written, with what was in it, and memory that is new."""

    saved: dict[int, tuple[torch.Tensor, torch.Tensor]]
    made: set[int]


class RecentWrites:
    """Saves what is in tensors before they are written, from a mark on until that is released.

    One copy for each mark of the memory that is written and was there before it; without marks this costs nothing.
    """

    def __init__(self) -> None:
        self._levels: list[_Level] = []

    def mark(self) -> int:
        """Return what `forget` and `release` need. Marks are nested."""
        self._levels.append(_Level({}, set()))
        return len(self._levels) - 1

    @property
    def are_saved(self) -> bool:
        """Whether there is a mark."""
        return bool(self._levels)

    def note_made(self, memories: Iterable[int]) -> None:
        """Take note of memory that is new."""
        if self._levels:
            self._levels[-1].made.update(memories)

    def save(self, written: Iterable[torch.Tensor]) -> None:
        """Copy the memory of tensors that are about to be written, once for each mark."""
        for tensor in written if self._levels else ():
            saved, made = self._levels[-1]
            memory = memory_of(tensor)
            has_memory = memory != id(tensor) and tensor.layout is torch.strided
            if has_memory and memory not in saved and memory not in made:
                whole = whole_memory(tensor)
                saved[memory] = whole, whole.clone()

    def release(self, mark: int) -> None:
        """Take note that nothing will be put back to `mark`."""
        while len(self._levels) > mark:
            saved, made = self._levels.pop()
            if self._levels:
                around = self._levels[-1]
                for memory, values in saved.items():
                    if memory not in around.made:
                        around.saved.setdefault(memory, values)
                around.made.update(made)

    def forget(self, mark: int) -> None:
        """Put back what was written since `mark`, unseen by a trace."""
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            while len(self._levels) > mark:
                for whole, values in self._levels.pop().saved.values():
                    whole.copy_(values)


def whole_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return all memory of which a tensor may be a part, as bytes, with versions of its own."""
    with torch._C._InferenceMode(False):  # or it could not be written after the region in which it was made
        return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
