"""Mark the functions that featx writes into graphs to check something when the graph runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

_F = TypeVar("_F", bound=Callable[..., Any])
_MARK = "__featx_runtime_check__"


def runtime_check(function: _F) -> _F:
    """Mark `function`, which raises or returns None and writes nothing. Return it."""
    setattr(function, _MARK, function)
    return function


def is_runtime_check(function: object) -> bool:
    """Say whether a function is one that was marked, and not one that wraps it and has its attributes."""
    return getattr(function, _MARK, None) is function
