"""Arrays of numpy, which need not be installed."""

from __future__ import annotations

import hashlib
import sys
from typing import Any

import torch

from featx.tracing.objects.replaced_globals import original_of

# Booleans, integers and numbers of floating point.
_NUMBERS = "biufc"
# Dtypes of scalars that a graph holds as they are.
_AS_OF_PYTHON = frozenset({"bool", "int64", "float64"})
# Functions of numpy that make arrays of plain arguments alone. What is in an array of `empty` follows from nothing.
_CONSTRUCTORS = ("zeros", "ones", "full", "linspace", "arange")
# Those that make an array of the items of a sequence.
_OF_ITEMS = ("array", "asarray")
# Those that make one number of a sequence.
REDUCTIONS = ("prod", "sum", "max", "min", "amax", "amin", "mean")


def is_array(value: object) -> bool:
    """Say whether a value is an array of numpy."""
    return type(value).__name__ == "ndarray" and hasattr(value, "tobytes")


def is_array_of_numbers(value: Any) -> bool:
    """Say whether a value is an array of numpy of which torch makes a tensor."""
    return is_array(value) and value.dtype.kind in _NUMBERS and value.dtype.isnative


def is_scalar_of_numpy(value: object) -> bool:
    """Say whether a value is a number or a truth value of numpy."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and issubclass(type(value), (numpy.number, numpy.bool_))


def is_of_numpy(function: object) -> bool:
    """Say whether a function or class is one of numpy."""
    return str(getattr(function, "__module__", "")).partition(".")[0] == "numpy"


def is_ufunc(function: Any) -> bool:
    """Say whether a function is a universal function of numpy that gives one result."""
    numpy = sys.modules["numpy"]
    is_one = isinstance(function, numpy.ufunc) and function.nout == 1
    return is_one and vars(numpy).get(function.__name__) is function


def array_of_scalar(value: Any) -> Any:
    """Return a scalar of numpy as an array, if a number of Python would give a tensor of another dtype; else `value`.

    `torch.tensor(np.int32(4))` is one of int32.
    """
    is_of_other_dtype = is_scalar_of_numpy(value) and value.dtype.name not in _AS_OF_PYTHON
    return sys.modules["numpy"].asarray(value) if is_of_other_dtype else value


def functions_of_sizes() -> dict[str, Any]:
    """Return the functions of numpy that are followed where forward calls them with sizes, by name.

    None where numpy is not loaded.
    """
    return _functions(*_CONSTRUCTORS, *_OF_ITEMS, *REDUCTIONS)


def is_array_constructor(function: Any) -> bool:
    """Say whether a function is one of numpy that makes an array of sizes: `np.zeros`."""
    return _is_one_of(_CONSTRUCTORS, function)


def is_of_given_items(function: Any) -> bool:
    """Say whether a function is one of numpy that makes an array of a sequence: `np.array`."""
    return _is_one_of(_OF_ITEMS, function)


def is_reduction(function: Any) -> bool:
    """Say whether a function is one of numpy that makes a number of a sequence of them: `np.prod`."""
    return _is_one_of(REDUCTIONS, function)


def _functions(*names: str) -> dict[str, Any]:
    numpy = sys.modules.get("numpy")
    return {} if numpy is None else {name: original_of(vars(numpy)[name]) for name in names}


def _is_one_of(names: tuple[str, ...], function: Any) -> bool:
    name = getattr(function, "__name__", None)
    return name in names and any(function is each for each in _functions(*names).values())


def tensor_of(array: Any) -> torch.Tensor:
    """Return a tensor with the numbers of an array, which no trace sees. O(size)."""
    with torch._C.DisableTorchFunction():
        return torch.from_numpy(array.copy())


def description_of(array: Any) -> tuple[str, tuple[int, ...], str]:
    """Return dtype, shape and a digest of the values of an array of numpy. O(size)."""
    return str(array.dtype), tuple(array.shape), hashlib.sha256(array.tobytes()).hexdigest()
