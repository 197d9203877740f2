"""Which callables do what their name says: functions and classes of torch and Python, and no other objects."""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
from typing import Any

import torch
from torch import nn

from featx.ir.node import Node

# Their `__module__` and `__qualname__` are their own. Those of `functools.partial(f)`, `operator.itemgetter(0)` and of
# a function that torch.jit has compiled are those of their class.
_FUNCTIONS = (
    types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.MethodDescriptorType,
    types.WrapperDescriptorType, types.MethodWrapperType, types.ClassMethodDescriptorType,
)  # fmt: skip
_CODE = (
    types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial, nn.Module,
    torch.jit.ScriptFunction,
)  # fmt: skip
# Libraries whose classes write no argument when an object is made.
_LIBRARIES = frozenset({"builtins", "torch", "collections", "typing", "types", "datetime", "decimal", "numpy"})
# Functions of Python that do nothing but return something, which may share memory with what they are given.
_BUILTINS = frozenset(
    "abs all any ascii bin callable chr divmod format getattr hasattr hash hex id isinstance issubclass iter len max "
    "min oct ord pow repr round sorted sum vars".split()
)
# Switches of torch, and what seeds, saves or goes backward, by the beginnings of their names.
_SWITCHES = ("set_", "_set_", "use_deterministic", "manual_seed", "seed", "_enter_", "_exit_", "backward", "save")


def has_own_name(function: Any) -> bool:
    """Say whether a callable is one whose name says which code runs."""
    return isinstance(function, _FUNCTIONS) or _is_known_class(function)


def is_reading_builtin(name: str) -> bool:
    """Say whether the function of Python of this name writes none of its arguments: not `next`, `setattr`, `print`."""
    return name in _BUILTINS


def is_switch(name: str) -> bool:
    """Say whether the function of torch of this name changes how later code runs, or does something outside of it."""
    return name.startswith(_SWITCHES) and not name.endswith("_")


def is_given_code(node: Node) -> bool:
    """Say whether functions or modules are among the arguments of a call, which it may run."""
    return any(isinstance(value, _CODE) for value in (*node.args, *node.kwargs.values()))


def _is_known_class(value: Any) -> bool:
    """Say whether making an object of a class runs no code but that of Python, torch and other libraries."""
    if not isinstance(value, type):
        return False
    kind: type[Any] = value
    if kind.__module__.partition(".")[0] in _LIBRARIES or issubclass(kind, (enum.Enum, BaseException)):
        return True
    if issubclass(kind, tuple):
        return hasattr(kind, "_fields")
    return dataclasses.is_dataclass(kind) and not hasattr(kind, "__post_init__")
