"""Arrays of numpy, which need not be installed."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

# Booleans, integers and numbers of floating point.
_NUMBERS = "biufc"


def is_array(value: object) -> bool:
    """Say whether a value is an array of numpy."""
    return type(value).__name__ == "ndarray" and hasattr(value, "tobytes")


def is_array_of_numbers(value: Any) -> bool:
    """Say whether a value is an array of numpy of which torch makes a tensor."""
    return is_array(value) and value.dtype.kind in _NUMBERS and value.dtype.isnative


def tensor_of(array: Any) -> torch.Tensor:
    """Return a tensor with the numbers of an array, which no trace sees. O(size)."""
    with torch._C.DisableTorchFunction():
        return torch.from_numpy(array.copy())


def description_of(array: Any) -> tuple[str, tuple[int, ...], str]:
    """Return dtype, shape and a digest of the values of an array of numpy. O(size)."""
    return str(array.dtype), tuple(array.shape), hashlib.sha256(array.tobytes()).hexdigest()
