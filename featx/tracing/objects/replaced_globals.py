"""What a trace puts under global names of the model's Python files, and what it stands in for."""

from __future__ import annotations

from types import FunctionType
from typing import Any


class ReplacedGlobal:
    """Stands in for `function`, a function or Python module, under a global name."""

    __slots__ = ("function",)

    def __init__(self, function: Any) -> None:
        self.function = function


def original_of(value: Any) -> Any:
    """Return what `value` stands in for, if it is what a trace has put under a global name; else `value`."""
    return value.function if isinstance(value, ReplacedGlobal) else value


def global_of(function: FunctionType, name: str, default: Any = None) -> Any:
    """Return the global that a name means in the code of a function."""
    return original_of(function.__globals__.get(name, default))
