"""Keep the values of tensors that a trace writes over in the globals of Python modules, and put them back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from featx.ir.memory import memory_of


class SavedGlobals:
    """The tensors in the globals of a model's Python modules that were written, with the values that they had.

    Args:
        by_memory: all such tensors, by their memory.
    """

    def __init__(self, by_memory: Mapping[int, list[torch.Tensor]]) -> None:
        self._by_memory = by_memory
        self._saved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def save(self, written: Iterable[Any]) -> None:
        """Copy the tensors whose memory is about to be written, once each."""
        for value in written:
            if isinstance(value, torch.Tensor) and not value.is_meta:
                for tensor in self._by_memory.get(memory_of(value), ()):
                    if id(tensor) not in self._saved:
                        self._saved[id(tensor)] = (tensor, tensor.detach().clone())

    def restore(self) -> None:
        """Put values back that are others now. May be called twice."""
        with torch.no_grad():
            for tensor, saved in self._saved.values():
                # A write makes a new version, at which gradients fail that other code is about to compute.
                if not torch.equal(tensor, saved):
                    tensor.copy_(saved)
