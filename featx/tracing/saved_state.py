"""Keep the values that a trace with real tensors writes over, and put them back."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType

import torch


class SavedState:
    """Tensors that are about to be written, and the state of the random generators.

    A context manager: at its end the tensors have their values again, and the generators go on where they were.
    """

    def __init__(self) -> None:
        self._saved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def save(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copy each tensor that is not saved yet."""
        for tensor in tensors:
            if id(tensor) not in self._saved:
                self._saved[id(tensor)] = (tensor, tensor.detach().clone())

    def __enter__(self) -> SavedState:
        self._fork = torch.random.fork_rng()
        self._fork.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._fork.__exit__(kind, error, traceback)
        with torch.no_grad():
            for tensor, saved in self._saved.values():
                tensor.copy_(saved)
