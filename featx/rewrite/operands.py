"""Line up the arguments of a call in a pattern with those of a call in a graph, and compare constants."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import nn

from featx.ir.arguments import nodes_in
from featx.ir.equality import is_same
from featx.ir.names import qualified_name
from featx.ir.node import Node
from featx.ir.paths import module_at
from featx.rewrite.wildcards import AnyConstant, AnyOf

# An argument of the pattern and the argument of the graph that is to match it.
Pairs = list[tuple[Any, Any]]

_COMMUTATIVE = frozenset(
    "add mul multiply eq ne and or xor and_ or_ maximum minimum fmax fmin logical_and logical_or logical_xor "
    "bitwise_and bitwise_or bitwise_xor logaddexp logaddexp2 hypot".split()
)


def operand_pairs(wanted: Node, found: Node, owner: nn.Module | None) -> Pairs | None:
    """Return the arguments of `wanted` (of a pattern) beside those of `found`, or None where they cannot be lined up.

    What one call passes by position and the other by name stands in one pair, where the signature of what `found`
    calls is known; `owner` is the module that has the targets of its graph. Defaults are filled in for functions
    written in Python, modules and overloads of operators. O(arguments).
    """
    args, found_args = wanted.args, found.args
    kwargs, found_kwargs = wanted.kwargs, found.kwargs
    if len(args) == len(found_args) and kwargs.keys() == found_kwargs.keys():
        pairs = list(zip(args, found_args, strict=True))
        if kwargs:
            pairs.extend((value, found_kwargs[key]) for key, value in kwargs.items())
        return pairs
    for bind in _binders(found, owner):
        bound, found_bound = bind(wanted), bind(found)
        if bound is not None and found_bound is not None and bound.keys() == found_bound.keys():
            return [(value, found_bound[key]) for key, value in bound.items()]
    return None


def inner_pairs(wanted: Any, found: Any) -> Pairs | None:
    """Return what `wanted` and `found` hold, in pairs, if they are containers of one form, else None."""
    if isinstance(wanted, (tuple, list)):
        items = cast(tuple[Any, ...], wanted)
        if isinstance(found, (tuple, list)) and len(items) == len(cast(tuple[Any, ...], found)):
            return list(zip(items, cast(tuple[Any, ...], found), strict=True))
    elif isinstance(wanted, dict):
        mapping = cast(dict[Any, Any], wanted)
        if isinstance(found, dict) and mapping.keys() == cast(dict[Any, Any], found).keys():
            return [(value, found[key]) for key, value in mapping.items()]
    elif isinstance(wanted, slice) and isinstance(found, slice):
        return [(wanted.start, found.start), (wanted.stop, found.stop), (wanted.step, found.step)]
    return None


def is_constant(wanted: Any, found: Any) -> bool:
    """Say whether the constant `found` is what the constant or wildcard `wanted` of a pattern asks for."""
    if isinstance(wanted, AnyConstant):
        return not nodes_in(found)
    if isinstance(wanted, AnyOf):
        return any(is_same(choice, found) for choice in wanted.choices)
    return is_same(wanted, found)


def is_commutative(node: Node) -> bool:
    """Say whether a call means the same with its two operands exchanged: sums, products, `==`, `maximum`..."""
    if len(node.args) != 2 or node.kwargs:
        return False
    if node.op == "call_method":
        return node.target.strip("_") in _COMMUTATIVE and not _writes(node.target)
    if node.op != "call_function":
        return False
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.name.rpartition("::")[2] in _COMMUTATIVE
    module, _, name = qualified_name(node.target).rpartition(".")
    return name in _COMMUTATIVE and (module == "operator" or module.split(".")[0] == "torch")


def _writes(method: str) -> bool:
    return method.endswith("_") and not method.startswith("__")


# -- signatures --------------------------------------------------------------------------------------------------------

_Binder = Callable[[Node], "dict[str, Any] | None"]


def _binders(node: Node, owner: nn.Module | None) -> Iterable[_Binder]:
    """Yield what may say by name which arguments a call like `node` has."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        yield _Overload(target._schema, fill=True)
    elif node.op == "call_module":
        module = module_at(owner, target)
        if module is not None:
            yield _Signature(module.forward)
    elif inspect.isfunction(target):
        yield _Signature(target)
    elif node.op == "call_method" or qualified_name(target).startswith(("torch.", "torch._C.")):
        name = target if isinstance(target, str) else target.__name__
        # Several overloads may have one name, so their defaults say nothing.
        for schema in torch._C._jit_get_schemas_for_operator(f"aten::{name}"):
            yield _Overload(schema, fill=False)


class _Signature:
    """Binds the arguments of a call as Python would."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._signature = inspect.signature(function)

    def __call__(self, node: Node) -> dict[str, Any] | None:
        try:
            bound = self._signature.bind(*node.args, **node.kwargs)
        except TypeError:
            return None
        bound.apply_defaults()
        return bound.arguments


class _Overload:
    """Binds the arguments of a call to the names in the schema of an operator."""

    def __init__(self, schema: Any, *, fill: bool) -> None:
        self._arguments = schema.arguments
        self._fill = fill

    def __call__(self, node: Node) -> dict[str, Any] | None:
        names = [argument.name for argument in self._arguments if not argument.kwarg_only]
        if len(node.args) > len(names):
            return None
        bound = dict(zip(names, node.args, strict=False))
        known = {argument.name for argument in self._arguments}
        for name, value in node.kwargs.items():
            # Python's name for what schemas call self.
            name = "self" if name == "input" and "input" not in known else name
            if name not in known or name in bound:
                return None
            bound[name] = value
        if self._fill:
            for argument in self._arguments:
                if argument.name not in bound:
                    bound[argument.name] = argument.default_value
        return bound
