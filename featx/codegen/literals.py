"""Turn the values in a node's arguments into Python source."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from typing import Any, Protocol, cast

import torch

from featx.codegen.identifiers import attribute, is_dotted_name, quoted
from featx.errors import ArgumentTypeError
from featx.ir.names import qualified_name, resolve
from featx.ir.node import Node

_TORCH_CONSTANTS = (torch.dtype, torch.layout, torch.memory_format)


class Scope(Protocol):
    """What writing a value needs of the code around it."""

    def name_of_node(self, node: Node) -> str:
        """Return the variable that holds the value of `node`."""
        ...

    def name_of_builtin(self, name: str) -> str:
        """Return the expression for a builtin, which an input may hide."""
        ...

    def name_of_global(self, hint: str, value: object) -> str:
        """Return the global name under which the code finds `value`."""
        ...

    def name_of_tensor(self, tensor: torch.Tensor) -> str:
        """Return the expression that reads `tensor`, which the module keeps as an attribute."""
        ...


def literal(value: Any, scope: Scope) -> str:  # Any: whatever a model passes as an argument
    """Write `value` as an expression that evaluates to an equal value.

    Raises:
        ArgumentTypeError: no code can express it and it cannot be kept as a global object either.
    """
    kind = type(value)
    if kind is Node:
        return scope.name_of_node(value)
    write = _WRITERS.get(kind)
    if write is not None:
        return write(value, scope)
    for base, write in _WRITERS_BY_BASE:
        if isinstance(value, base):
            return write(value, scope)
    if callable(value):
        return function_name(value, scope)
    return scope.name_of_global(f"_{kind.__name__.lower()}", value)


def function_name(function: Callable[..., Any], scope: Scope) -> str:
    """Write a function or class by its qualified name where torch has it, else as a global of the code.

    A function of featx is called `featx_` and its own name there, and not by the file that it is in.
    """
    name = qualified_name(function)
    if is_dotted_name(name):
        if "." not in name:
            return scope.name_of_builtin(name)
        if name.startswith("torch.") and resolve(name) is function:
            return name
        if name.startswith("featx."):
            return scope.name_of_global(f"featx_{name.rpartition('.')[2]}", function)
    return scope.name_of_global(name, function)


def _float(value: float, scope: Scope) -> str:
    if math.isnan(value):
        return "nan"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return repr(value)


def _complex(value: complex, scope: Scope) -> str:
    # repr() of a complex loses the sign of zeros and writes nan and inf as names that do not exist.
    return f"{scope.name_of_builtin('complex')}({_float(value.real, scope)}, {_float(value.imag, scope)})"


def _items(values: Any, scope: Scope) -> str:
    return ", ".join([literal(item, scope) for item in values])


def _tuple(value: tuple[Any, ...], scope: Scope) -> str:
    return f"({literal(value[0], scope)},)" if len(value) == 1 else f"({_items(value, scope)})"


def _named_tuple(value: tuple[Any, ...], scope: Scope) -> str:
    kind = type(value)
    if hasattr(value, "_fields"):
        return f"{function_name(kind, scope)}({_items(value, scope)})"
    return _tuple(value, scope) if kind is tuple else f"{function_name(kind, scope)}({_tuple(tuple(value), scope)})"


def _list(value: list[Any], scope: Scope) -> str:
    return f"[{_items(value, scope)}]"


def _dict(value: dict[Any, Any], scope: Scope) -> str:
    return "{" + ", ".join([f"{literal(key, scope)}: {literal(item, scope)}" for key, item in value.items()]) + "}"


def _set(value: Any, scope: Scope) -> str:
    items = f"{{{_items(value, scope)}}}" if value else f"{scope.name_of_builtin('set')}()"
    return f"{scope.name_of_builtin('frozenset')}({items})" if isinstance(value, frozenset) else items


def _slice(value: slice, scope: Scope) -> str:
    return f"{scope.name_of_builtin('slice')}({_items((value.start, value.stop, value.step), scope)})"


def _range(value: range, scope: Scope) -> str:
    return f"{scope.name_of_builtin('range')}({_items((value.start, value.stop, value.step), scope)})"


def _enum(value: enum.Enum, scope: Scope) -> str:
    kind = function_name(type(value), scope)
    # A combination of flags has no member of its own.
    name = value._name_
    if type(value).__members__.get(name) is value:
        return attribute(kind, name, scope.name_of_builtin)
    return f"{kind}({literal(value._value_, scope)})"


def _device(value: torch.device, scope: Scope) -> str:
    return f"torch.device({quoted(str(value))})"


def _tensor(value: torch.Tensor, scope: Scope) -> str:
    return scope.name_of_tensor(value)


def _module(value: torch.nn.Module, scope: Scope) -> str:
    raise ArgumentTypeError(
        f"a {type(value).__name__} module is an argument of a node, which code cannot hold; "
        "register it in the root module and read it with graph.get_attr(path)"
    )


def _plain(value: object, scope: Scope) -> str:
    return repr(value)


def _int(value: int, scope: Scope) -> str:
    try:
        return int.__repr__(value)
    except ValueError:  # Python limits how many decimal digits it writes and reads
        return hex(value)


def _str(value: str, scope: Scope) -> str:
    return quoted(value)


_WRITERS: dict[type, Callable[[Any, Scope], str]] = {
    int: _int,
    bool: _plain,
    str: _str,
    bytes: _plain,
    type(None): _plain,
    type(Ellipsis): lambda value, scope: "...",
    float: _float,
    complex: _complex,
    tuple: _tuple,
    list: _list,
    dict: _dict,
    slice: _slice,
    range: _range,
    set: _set,
    frozenset: _set,
    torch.device: _device,
    **dict.fromkeys(cast(tuple[type, ...], _TORCH_CONSTANTS), _plain),
}
_WRITERS_BY_BASE: tuple[tuple[type, Callable[[Any, Scope], str]], ...] = (
    (Node, lambda value, scope: scope.name_of_node(value)),
    (enum.Enum, _enum),
    (torch.Tensor, _tensor),
    (torch.nn.Module, _module),
    (tuple, _named_tuple),
    (list, _list),
    (dict, _dict),
    (int, _int),
    # A float of another class (numpy has one) stays what it is.
    (float, lambda value, scope: scope.name_of_global(f"_{type(value).__name__}", value)),
    (str, _str),
)
