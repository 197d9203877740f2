"""Lists, dicts and objects that a graph gives to a call, and what the call must leave in them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from featx.errors import SpecializationError
from featx.ir.runtime_checks import runtime_check
from featx.rebuilding import attributes_of


@runtime_check
def check_held(value: Any, left: Any, what: str) -> None:
    """Raise unless a call has left in `value` what it left there on the example.

    Args:
        value: what the call was given.
        left: what must be in it: lists for lists and tuples, dicts for dicts and attributes, the very tensors of the
            graph, plain values, and `...` for what is not compared.
        what: names the call, for the message.

    Raises:
        SpecializationError: it holds something else.
    """
    if not torch.jit.is_scripting():  # pyright: ignore[reportPrivateImportUsage]
        _check(value, left, what)


def _check(value: Any, left: Any, what: str) -> None:
    if not _holds(value, left):
        raise SpecializationError(
            f"{what} is something else than on the example, and a graph goes on with what it was there. To go on, "
            "request a name inside that module, which is traced through then, or make the extractor with adaptive=True"
        )


def _holds(value: Any, left: Any) -> bool:
    if left is ...:
        return True
    if isinstance(left, (list, tuple)):
        if not isinstance(value, (list, tuple)) or len(value) != len(left):
            return False
        return all(map(_holds, value, left))
    if isinstance(left, Mapping):
        items = value if isinstance(value, Mapping) else attributes_of(value)
        return list(items) == list(left) and all(map(_holds, items.values(), left.values()))
    return value is left or (not isinstance(left, torch.Tensor) and type(value) is type(left) and bool(value == left))
