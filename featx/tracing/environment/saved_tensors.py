"""Keep the values that a trace with real tensors writes over, and put them back."""

from __future__ import annotations

from collections.abc import Iterable

import torch


class SavedState:
    """Tensors that are about to be written, with the values that they had."""

    def __init__(self) -> None:
        self._saved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def save(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copy each tensor that is not saved yet."""
        for tensor in tensors:
            if id(tensor) not in self._saved:
                self._saved[id(tensor)] = (tensor, tensor.detach().clone())

    def restore(self) -> None:
        """Put the values back. May be called twice."""
        with torch.no_grad():
            for tensor, saved in self._saved.values():
                tensor.copy_(saved)
