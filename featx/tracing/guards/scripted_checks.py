"""What the checks of a graph do in TorchScript, which has no `==` of two values of unknown type."""

# TorchScript picks among overloads of one name, which torch.jit does not export by name for type checkers, and
# asks for types with type arguments in `isinstance`.
# pyright: reportRedeclaration=false, reportPrivateImportUsage=false, reportArgumentType=false

from types import NoneType
from typing import Any, TypeAlias

import torch


def is_same_in_script(value: Any, expected: Any) -> bool:
    """Say whether `value` equals `expected`: numbers, strings, tensors of one element, lists of sizes, devices, None.

    Values of all other types count as different, so that a check of them raises. Dtypes are integers in TorchScript.
    """
    if isinstance(value, bool):
        return isinstance(expected, bool) and value == expected
    if isinstance(value, int):
        if isinstance(expected, float):
            return float(value) == expected
        return isinstance(expected, int) and value == expected
    if isinstance(value, float):
        if isinstance(expected, int):
            return value == float(expected)
        return isinstance(expected, float) and (value == expected or (value != value and expected != expected))
    if isinstance(value, str):
        return isinstance(expected, str) and value == expected
    if isinstance(value, torch.Tensor):
        if isinstance(expected, bool):
            return bool(value) == expected
        if isinstance(expected, int):
            return bool(value == expected)
        return isinstance(expected, float) and bool(value == expected)
    if isinstance(value, torch.device):
        return isinstance(expected, torch.device) and value == expected
    return isinstance(value, NoneType) and isinstance(expected, NoneType)


# TorchScript can neither loop over a tuple of unknown types nor call a function within itself.
_Two: TypeAlias = tuple[Any, Any]
_Three: TypeAlias = tuple[Any, Any, Any]
_Four: TypeAlias = tuple[Any, Any, Any, Any]


def text_of_known_form(form: Any) -> str:
    """Return what `form_of` gave as text; lists count as tuples, because `unbind` gives a list in TorchScript."""
    return str(form).replace("(list, ", "(tuple, ")


# Attention gives an undefined tensor in place of weights. TorchScript takes it for None only where the type says so.
@torch.jit._overload
def text_of_form(value: tuple[torch.Tensor, torch.Tensor | None]) -> str: ...  # noqa: D103


@torch.jit._overload
def text_of_form(value: Any) -> str: ...  # noqa: D103, F811


def text_of_form(value: Any) -> str:  # noqa: F811
    """Return how `value` is nested, as `text_of_known_form` writes it: two levels, of up to four and three values."""
    if isinstance(value, _Two):
        second = value[1]
        return f"(tuple, {_flat_text(value[0])}, {'None' if second is None else _flat_text(second)})"
    if isinstance(value, _Three):
        return f"(tuple, {_flat_text(value[0])}, {_flat_text(value[1])}, {_flat_text(value[2])})"
    if isinstance(value, _Four):
        first, last = (
            f"{_flat_text(value[0])}, {_flat_text(value[1])}",
            f"{_flat_text(value[2])}, {_flat_text(value[3])}",
        )
        return f"(tuple, {first}, {last})"
    return _flat_text(value)


def _flat_text(value: Any) -> str:
    if isinstance(value, _Two):
        return f"(tuple, {_leaf_text(value[0])}, {_leaf_text(value[1])})"
    if isinstance(value, _Three):
        return f"(tuple, {_leaf_text(value[0])}, {_leaf_text(value[1])}, {_leaf_text(value[2])})"
    if isinstance(value, list[torch.Tensor]):
        return f"(tuple, {', '.join([_leaf_text(item) for item in value])})"
    return _leaf_text(value)


def _leaf_text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"tensor of {value.dim()} dimensions"
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, int):
        return "int"
    if isinstance(value, float):
        return "float"
    if isinstance(value, str):
        return value
    return "None" if isinstance(value, NoneType) else "a value of another type"
