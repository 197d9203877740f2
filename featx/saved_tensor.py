"""Keep what is in a tensor, and put it back where something has written it."""

from __future__ import annotations

import torch


class SavedTensor:
    """A copy of a tensor as it is when this is made."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._copy = tensor, tensor.detach().clone()
        self._version = self._count_writes()

    def restore(self) -> None:
        """Write the copy back if the tensor has changed since; may be called twice.

        A needless write would break the backward pass of earlier outputs, and into an expanded tensor it fails.
        """
        # Batch norm writes its statistics without counting.
        if self._count_writes() != self._version or not _is_same(self._tensor, self._copy):
            with torch.inference_mode(self._tensor.is_inference()), torch.no_grad():
                self._tensor.copy_(self._copy)

    def _count_writes(self) -> int | None:
        return None if self._tensor.is_inference() else self._tensor._version


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.layout is not torch.strided or one.is_meta:
        return True  # no kernel compares these; what writes them counts
    if torch.equal(one, other):
        return True
    return one.is_floating_point() and bool(torch.all((one == other) | (one.isnan() & other.isnan())))
