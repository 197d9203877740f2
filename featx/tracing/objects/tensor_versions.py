"""The versions of tensors: how often each was written in place."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def versions_of(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return how often each tensor was written. Those made in inference mode do not count it."""
    with torch._C.DisableTorchFunction():  # a trace would take these for questions of the model
        return [0 if tensor.is_inference() else tensor._version for tensor in tensors]
