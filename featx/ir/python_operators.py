"""Python's operators: their functions in the module `operator`, and how they are written."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

# By the names of their functions.
ARITHMETIC = {
    "add": "+", "sub": "-", "mul": "*", "floordiv": "//", "truediv": "/", "mod": "%", "pow": "**", "lshift": "<<",
    "rshift": ">>", "and_": "&", "or_": "|", "xor": "^", "matmul": "@",
}  # fmt: skip
COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "gt": ">", "le": "<=", "ge": ">="}
UNARY = {"pos": "+", "neg": "-", "invert": "~"}


def _by_function(symbols: dict[str, str]) -> dict[Callable[..., Any], str]:
    return {getattr(operator, name): symbol for name, symbol in symbols.items()}


def method_of(name: str, prefix: str = "") -> str:
    """Return the method behind a function of `operator`: `__and__` of `and_`; with the prefix "r" `__rand__`."""
    return f"__{prefix}{name.rstrip('_')}__"


# By the functions themselves. `operator.iadd` stands for `+=`.
INFIX = _by_function(COMPARISONS | ARITHMETIC)
PREFIX = _by_function(UNARY)
AUGMENTED = _by_function({f"i{name.rstrip('_')}": f"{symbol}=" for name, symbol in ARITHMETIC.items()})
