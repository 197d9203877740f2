"""Tables of the torch functions that Python's operators call."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

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
COMPARISONS: dict[str, Callable[..., Any]] = {
    name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")
}
UNARY: dict[str, tuple[str, Callable[..., Any]]] = {"neg": ("-", operator.neg), "positive": ("+", operator.pos)}
# Functions that nothing but an operator calls.
MAGIC: dict[str, Callable[..., Any]] = {
    **{f"__{name}__": getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge", "getitem", "setitem")},
    "__and__": operator.and_,
    "__or__": operator.or_,
    "__xor__": operator.xor,
    "__invert__": operator.invert,
    "__lshift__": operator.lshift,
    "__rshift__": operator.rshift,
    "__floordiv__": operator.floordiv,
    "__pow__": operator.pow,
    "__iand__": operator.iand,
    "__ior__": operator.ior,
    "__ixor__": operator.ixor,
    "__ipow__": operator.ipow,
}
REFLECTED: dict[str, Callable[..., Any]] = {
    "__radd__": operator.add,
    "__rsub__": operator.sub,
    "__rmul__": operator.mul,
    "__rdiv__": operator.truediv,
    "__rtruediv__": operator.truediv,
    "__rfloordiv__": operator.floordiv,
    "__rpow__": operator.pow,
    "__rmod__": operator.mod,
    "__rmatmul__": operator.matmul,
    "__rand__": operator.and_,
    "__ror__": operator.or_,
    "__rxor__": operator.xor,
    "__rlshift__": operator.lshift,
    "__rrshift__": operator.rshift,
}
