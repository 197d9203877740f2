"""Read which attributes the methods of a class of modules read and assign."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Set
from functools import lru_cache
from itertools import chain
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from featx.ir.torch_layers import is_torch_layer
from featx.tracing.source.location import Function, codes_in, definition_of


def assigned_to_others(kind: type) -> set[str]:
    """Return the attributes that the forward of a class of modules, and methods that it calls, assign to other objects.

    A loop over modules, `self.child.state = None`: whoever is assigned to, a graph does not do it. Without source: all
    names that the code has.
    """
    pending: list[Any] = [getattr(kind, "forward", None)]
    seen: set[CodeType] = set()
    found: set[str] = set()
    while pending:
        function = pending.pop()
        code: CodeType | None = getattr(function, "__code__", None)
        if code is None or code in seen:
            continue
        seen.add(code)
        own, assigned = _attributes_in(function)
        found |= assigned
        # `layer.type` is not the method that nn.Module has under that name.
        names = [name for name in _names_in(code) if name in own or not hasattr(nn.Module, name)]
        pending += [inspect.getattr_static(kind, name, None) for name in names]
    return found


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


def _attributes_in(function: FunctionType) -> tuple[Set[str], Set[str]]:
    """Return the names that a function reads of its first argument, and those that it assigns to anything else."""
    definition = definition_of(function)
    if definition is None:
        return set(), _names_in(function.__code__)
    return _attributes_of(definition, function.__code__.co_varnames[:1])


@lru_cache(maxsize=4096)
def _attributes_of(definition: Function, first: tuple[str, ...]) -> tuple[frozenset[str], frozenset[str]]:
    own: set[str] = set()
    assigned: set[str] = set()
    for node in ast.walk(definition):
        if isinstance(node, ast.Attribute):
            is_own = isinstance(node.value, ast.Name) and node.value.id in first
            if isinstance(node.ctx, ast.Store) and not is_own:
                assigned.add(node.attr)
            elif isinstance(node.ctx, ast.Load) and is_own:
                own.add(node.attr)
    return frozenset(own), frozenset(assigned)
