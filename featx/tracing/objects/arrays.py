"""Arrays of numpy, which need not be installed."""

from __future__ import annotations

import hashlib
import sys
from typing import Any

import torch

from featx.tracing.objects.replaced_globals import original_of

# Booleans, integers and numbers of floating point.
_NUMBERS = "biufc"
# Functions of numpy that make arrays of plain arguments alone. What is in an array of `empty` follows from nothing.
_CONSTRUCTORS = ("zeros", "ones", "full", "linspace", "arange")


def is_array(value: object) -> bool:
    """Say whether a value is an array of numpy."""
    return type(value).__name__ == "ndarray" and hasattr(value, "tobytes")


def is_array_of_numbers(value: Any) -> bool:
    """Say whether a value is an array of numpy of which torch makes a tensor."""
    return is_array(value) and value.dtype.kind in _NUMBERS and value.dtype.isnative


def array_constructors() -> dict[str, Any]:
    """Return the functions of numpy that make arrays of sizes, by name; none where numpy is not loaded."""
    numpy = sys.modules.get("numpy")
    return {} if numpy is None else {name: original_of(vars(numpy)[name]) for name in _CONSTRUCTORS}


def is_array_constructor(function: Any) -> bool:
    """Say whether a function is one of `array_constructors`."""
    return getattr(function, "__name__", None) in _CONSTRUCTORS and any(
        function is each for each in array_constructors().values()
    )


def tensor_of(array: Any) -> torch.Tensor:
    """Return a tensor with the numbers of an array, which no trace sees. O(size)."""
    with torch._C.DisableTorchFunction():
        return torch.from_numpy(array.copy())


def description_of(array: Any) -> tuple[str, tuple[int, ...], str]:
    """Return dtype, shape and a digest of the values of an array of numpy. O(size)."""
    return str(array.dtype), tuple(array.shape), hashlib.sha256(array.tobytes()).hexdigest()
