"""Tables of the torch functions that Python's operators call."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from featx.ir import python_operators

# By the name of the function that torch runs: what stands in the source, and what is recorded.
OPERATORS: dict[str, tuple[str, Callable[..., Any]]] = {
    "add": ("+", operator.add),
    "sub": ("-", operator.sub),
    "mul": ("*", operator.mul),
    "div": ("/", operator.truediv),
    "remainder": ("%", operator.mod),
    "matmul": ("@", operator.matmul),
    "pow": ("**", operator.pow),
    "add_": ("+=", operator.iadd),
    "sub_": ("-=", operator.isub),
    "mul_": ("*=", operator.imul),
    "div_": ("/=", operator.itruediv),
    "remainder_": ("%=", operator.imod),
    "pow_": ("**=", operator.ipow),
    "floor_divide_": ("//=", operator.ifloordiv),
}
COMPARISONS: dict[str, Callable[..., Any]] = {name: getattr(operator, name) for name in python_operators.COMPARISONS}
UNARY: dict[str, tuple[str, Callable[..., Any]]] = {"neg": ("-", operator.neg), "positive": ("+", operator.pos)}
# Functions that nothing but an operator calls.
_MAGIC = (*COMPARISONS, *"getitem setitem and_ or_ xor invert lshift rshift floordiv pow".split())
_INPLACE = ("and_", "or_", "xor", "pow")
MAGIC: dict[str, Callable[..., Any]] = {
    **{python_operators.method_of(name): getattr(operator, name) for name in _MAGIC},
    **{python_operators.method_of(name, "i"): getattr(operator, f"i{name.rstrip('_')}") for name in _INPLACE},
}
REFLECTED: dict[str, Callable[..., Any]] = {
    "__rdiv__": operator.truediv,
    **{python_operators.method_of(name, "r"): getattr(operator, name) for name in python_operators.ARITHMETIC},
}
