"""Read which attributes the methods of a class of modules read."""

from __future__ import annotations

import ast
import inspect
from functools import lru_cache
from itertools import chain
from types import CodeType, FunctionType
from typing import Any

from featx.ir.torch_layers import is_torch_layer
from featx.tracing.source.location import Function, codes_in, definition_of


def is_read(kind: type, attribute: str) -> bool:
    """Say whether a method of a class of modules, or a function beside it, reads an attribute of this name.

    Without source: whether its code has the name at all.
    """
    return any(attribute in _names_in(each.__code__) and _reads(each, attribute) for each in _functions_of(kind))


def is_tested_for(kind: type, attribute: str) -> bool:
    """Say whether such a function has the name of an attribute as a string: `hasattr(self, "calls")`."""
    return any(attribute in each.__code__.co_consts for each in _functions_of(kind))


def _functions_of(kind: type) -> list[FunctionType]:
    own = [vars(base).values() for base in kind.__mro__ if not is_torch_layer(base)]
    # A function beside the class may be given the module.
    beside: dict[str, Any] = getattr(getattr(kind, "forward", None), "__globals__", {})
    # A copy: other threads may add names meanwhile.
    return [value for value in chain(*own, beside.copy().values()) if inspect.isfunction(value)]


def _names_in(code: CodeType) -> set[str]:
    return {name for each in codes_in(code) for name in each.co_names}


def _reads(function: FunctionType, attribute: str) -> bool:
    definition = definition_of(function)
    return definition is None or attribute in _read_in(definition)


@lru_cache(maxsize=4096)
def _read_in(definition: Function) -> frozenset[str]:
    nodes = ast.walk(definition)
    return frozenset(node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load))
