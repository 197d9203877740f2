"""Find code that changes a list, dict or object that it is given, under a condition that an example may not meet."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import lru_cache
from types import FunctionType
from typing import Any

from torch import nn

from featx.ir.torch_layers import is_torch_layer
from featx.tracing.objects.module_tree import modules_of
from featx.tracing.source.argument_use import functions_reached
from featx.tracing.source.attributes import changed_parts, names_along
from featx.tracing.source.location import Function, definition_of

_BRANCHES = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.Try, ast.Match, ast.IfExp, ast.BoolOp)
# Methods that give a part of what they belong to.
_GIVING_PARTS = frozenset("get items pop setdefault values".split())
_ENDS = (ast.Return, ast.Raise, ast.Continue, ast.Break)


def may_change_given(module: nn.Module) -> bool:
    """Say whether the forward of a module, or of one inside it, may change what it is given for some inputs only.

    `if size > 6: state["a"] = ...` does; what runs in each call is measured. Read are assignments to items and
    attributes of parameters, and of names that stand for parts of them, and methods such as `append`; also in methods
    and functions that forward calls, where each one counts. Code without source is not read. O(modules inside), and
    code that is new.
    """
    own = (inner for inner in modules_of(module) if not is_torch_layer(type(inner)))
    forwards = ((inner.__dict__.get("forward", type(inner).forward), type(inner)) for inner in own)
    return any(_changes_sometimes(getattr(forward, "__func__", forward), kind) for forward, kind in forwards)


@lru_cache(maxsize=4096)
def _changes_sometimes(forward: Any, kind: type) -> bool:
    for function, is_forward in functions_reached(forward, kind) if isinstance(forward, FunctionType) else ():
        definition = definition_of(function)
        if definition is None or isinstance(definition, ast.Lambda):
            continue
        names = _names_of_given(definition)
        nodes = _conditional(definition.body) if is_forward else ast.walk(definition)
        if any(names_along(part)[0] in names for node in nodes for part in changed_parts(node)):
            return True
    return False


def _names_of_given(definition: Function) -> set[str]:
    """Return the parameters but for `self`, and the names that are assigned parts of them."""
    arguments = definition.args
    all_arguments = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg)
    names = {each.arg for each in all_arguments if each is not None} - {"self"}
    for node in ast.walk(definition):
        if isinstance(node, ast.Assign) and not names.isdisjoint(_roots(node.value)):
            names.update(each.id for target in node.targets for each in ast.walk(target) if isinstance(each, ast.Name))
        elif isinstance(node, (ast.For, ast.AsyncFor)) and not names.isdisjoint(_roots(node.iter)):
            names.update(each.id for each in ast.walk(node.target) if isinstance(each, ast.Name))
    return names


def _roots(value: ast.expr) -> set[str]:
    """Return the names of which the value of an expression may be a part; what a call of a function gives is none."""
    if isinstance(value, ast.IfExp):
        return _roots(value.body) | _roots(value.orelse)
    if isinstance(value, (ast.BoolOp, ast.Tuple, ast.List)):
        parts = value.values if isinstance(value, ast.BoolOp) else value.elts
        return set[str]().union(*map(_roots, parts))
    if isinstance(value, ast.Call):
        is_part = isinstance(value.func, ast.Attribute) and value.func.attr in _GIVING_PARTS
        return _roots(value.func) if is_part else set()
    return {names_along(value)[0]}


def _conditional(statements: list[ast.stmt]) -> Iterator[ast.AST]:
    """Yield the nodes that a call may leave out: those in branches, and those behind a branch that may end the call."""
    for place, statement in enumerate(statements):
        if isinstance(statement, ast.With):
            yield from _conditional(statement.body)
            continue
        branches = [node for node in ast.walk(statement) if isinstance(node, _BRANCHES)]
        for branch in branches:
            yield from ast.walk(branch)
        if any(isinstance(node, _ENDS) for branch in branches for node in ast.walk(branch)):
            for later in statements[place + 1 :]:
                yield from ast.walk(later)
            return
