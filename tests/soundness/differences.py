"""Turn two values into the first difference between them, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from types import FunctionType
from typing import Any

import torch
from torch import nn


def difference(expected: Any, actual: Any, path: str = "result") -> str:
    """Say where two nested values differ, or "": kinds, structure, and of tensors type, sizes, strides and bits."""
    if type(expected) is not type(actual):
        # Two copies of a model define two classes of one name.
        names = type(expected).__name__, type(actual).__name__
        if names[0] != names[1]:
            return f"{path} is a {names[1]}, expected {names[0]}: {_short(actual)}, expected {_short(expected)}"
    if isinstance(expected, torch.Tensor):
        return _difference_of_tensors(expected, actual, path)
    if isinstance(expected, dict):
        if list(expected) != list(actual):
            return f"{path} has keys {list(actual)}, expected {list(expected)}"
        pairs = ((f"{path}[{key!r}]", expected[key], actual[key]) for key in expected)
    elif isinstance(expected, (list, tuple)):
        if len(expected) != len(actual):
            return f"{path} has {len(actual)} items, expected {len(expected)}: {_short(actual)}, {_short(expected)}"
        pairs = ((f"{path}[{place}]", *both) for place, both in enumerate(zip(expected, actual, strict=True)))
    elif isinstance(expected, FunctionType) and expected.__closure__:
        # Two calls of what returns an inner function give two of them.
        closures = [[cell.cell_contents for cell in each.__closure__ or ()] for each in (expected, actual)]
        pairs = (
            (f"{path}.{name}", *both)
            for name, *both in (("code", expected.__code__, actual.__code__), ("closure", *closures))
        )
    else:
        # repr tells -0.0 from 0.0 and calls nan equal to nan.
        return "" if repr(expected) == repr(actual) else f"{path} is {actual!r}, expected {expected!r}"
    return next(filter(None, (difference(*both, where) for where, *both in pairs)), "")


def _difference_of_tensors(expected: torch.Tensor, actual: torch.Tensor, path: str) -> str:
    for name in ("dtype", "shape", "device", "requires_grad", "layout"):
        if getattr(expected, name) != getattr(actual, name):
            return f"{path}.{name} is {getattr(actual, name)}, expected {getattr(expected, name)}"
    if expected.numel() > 1 and expected.stride() != actual.stride():
        return f"{path}.stride() is {actual.stride()}, expected {expected.stride()}"
    if torch.equal(_bits(expected), _bits(actual)):
        return ""
    return f"{path} is {_short(actual)}, expected {_short(expected)}"


def _bits(value: torch.Tensor) -> torch.Tensor:
    # contiguous() keeps the stride of a single number, which view refuses.
    flat = value.detach().reshape(-1)
    return torch.empty(flat.shape, dtype=value.dtype).copy_(flat).view(torch.uint8)


def _short(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{tuple(value.shape)} {value.detach().reshape(-1)[:4].tolist()}"
    return f"{value!r:.80}"


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested dicts, lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def memory(value: Any) -> tuple[int, ...]:
    """Number the memories of the tensors in a value in the order of their first use; one memory has one number."""
    found: dict[int, int] = {}
    return tuple(
        found.setdefault(tensor.untyped_storage().data_ptr(), len(found)) if tensor.numel() else -1
        for tensor in tensors_in(value)
    )


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Note all that a model holds: modes, parameters, buffers, hooks, attributes. Tensors are copied."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        for name, value in module.__dict__.items():
            if name == "_modules":
                found[f"{path}.{name}"] = {key: type(item).__name__ for key, item in value.items()}
            else:
                found[f"{path}.{name}"] = _noted(value)
    return found


def _noted(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return [id(value), value.detach().clone(), value.requires_grad]
    if isinstance(value, dict):
        return {key: _noted(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_noted(item) for item in value]
    return value if isinstance(value, (int, float, str, type(None))) else id(value)
