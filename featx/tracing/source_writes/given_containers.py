"""Find code that changes a list, dict or object that it is given, under a condition that an example may not meet."""

from __future__ import annotations

import ast
import builtins
import inspect
from collections.abc import Iterable, Iterator
from functools import lru_cache
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from featx.ir.modules import modules_of
from featx.ir.torch_layers import is_torch_layer
from featx.tracing.objects.module_parts import forward_of
from featx.tracing.objects.replaced_globals import global_of
from featx.tracing.source.assignments import assigned_values
from featx.tracing.source.attributes import changed_parts, names_along
from featx.tracing.source.frames import is_library_code
from featx.tracing.source.location import Function, definition_of
from featx.tracing.source.parameters import Parameters

_BRANCHES = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.Try, ast.TryStar, ast.Match, ast.IfExp, ast.BoolOp)
# Methods that give a part of what they belong to.
_GIVING_PARTS = frozenset("get items pop setdefault values".split())
_ENDS = (ast.Return, ast.Raise, ast.Continue, ast.Break)


def may_change_given(module: nn.Module, places: Iterable[int | str]) -> bool:
    """Say whether a module may change, for some inputs only, what it is given at some places or by some names.

    `if size > 6: state["a"] = ...` does; what runs in each call is measured. Read are assignments to items and
    attributes of parameters, and of names that stand for parts of them, and methods such as `append`; also in methods
    and functions to which forward hands such a name, where each one counts, and in all modules inside if forward hands
    it to one of them. Code without source may change anything. O(modules inside), and code that is new.
    """
    changes, hands_on = _of_forward(forward_of(module), type(module), frozenset(places))
    inside = (inner for inner in modules_of(module) if inner is not module and not is_torch_layer(type(inner)))
    return changes or (hands_on and any(_of_forward(forward_of(each), type(each), None)[0] for each in inside))


@lru_cache(maxsize=4096)
def _of_forward(forward: Any, kind: type, places: frozenset[int | str] | None) -> tuple[bool, bool]:
    """Say whether a forward may change what it is given at `places`, or anywhere, and whether it hands that on."""
    if not isinstance(forward, FunctionType):  # scripted code gets copies
        return False, False
    definition = definition_of(forward)
    if definition is None:
        return not is_library_code(forward.__code__), True
    parameters = Parameters(definition)
    given = parameters.every if places is None else {parameters.name_of(place) for place in places}
    found = _Changes(kind)
    body: list[ast.stmt] = [ast.Expr(definition.body)] if isinstance(definition, ast.Lambda) else definition.body
    changes = found.are_in(forward, definition, given, _conditional(body))
    return changes, found.hands_on


class _Changes:
    """Looks for changes of what a function is given, and of what it hands on. Each function is read once.

    Attributes:
        hands_on: whether it is handed to what is no function that is known here, such as a module.
    """

    def __init__(self, kind: type) -> None:
        self.hands_on = False
        self._kind = kind
        self._seen: set[CodeType] = set()

    def are_in(
        self, function: FunctionType, definition: Function, given: Iterable[str], nodes: Iterable[ast.AST]
    ) -> bool:
        """Say whether one of `nodes` changes what the parameters `given` hold, or a function that gets it does."""
        self._seen.add(function.__code__)
        names = _names_of_given(definition, given)
        if any(names_along(part)[0] in names for node in nodes for part in _changed_by(node)):
            return True
        calls = (node for node in ast.walk(definition) if isinstance(node, ast.Call))
        return any(self._are_in_call(call, function, names) for call in calls)

    def _are_in_call(self, call: ast.Call, caller: FunctionType, names: set[str]) -> bool:
        places = [place for place, each in enumerate(call.args) if not names.isdisjoint(_roots(each))]
        keys = [each.arg for each in call.keywords if not names.isdisjoint(_roots(each.value))]
        if not places and not keys:
            return False
        callees = self._callees(call.func, caller)
        self.hands_on |= not callees and not _is_of_library(call.func, caller)
        return any(self._are_in_callee(each, call, places, keys) for each in callees)

    def _are_in_callee(self, callee: FunctionType, call: ast.Call, places: list[int], keys: list[str | None]) -> bool:
        if callee.__code__ in self._seen:
            return False
        definition = definition_of(callee)
        if definition is None:
            return True
        parameters = Parameters(definition)
        has_unpacked = None in keys or any(isinstance(call.args[place], ast.Starred) for place in places)
        given = parameters.every if has_unpacked else {parameters.name_of(each) for each in (*places, *keys)}
        return self.are_in(callee, definition, given, ast.walk(definition))

    def _callees(self, called: ast.expr, caller: FunctionType) -> list[FunctionType]:
        """Return the functions that a call may run, as far as they are known and of no library."""
        found: list[Any] = []
        if isinstance(called, ast.Name):
            found = [global_of(caller, called.id)]
        elif isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name) and called.value.id == "self":
            found = [inspect.getattr_static(self._kind, called.attr, None)]
        elif isinstance(called, ast.Attribute) and _is_super(called.value):
            found = [vars(base).get(called.attr) for base in self._kind.__mro__]
        functions: list[Any] = [inspect.unwrap(getattr(each, "__func__", each)) for each in found]
        return [each for each in functions if isinstance(each, FunctionType) and not is_library_code(each.__code__)]


def _is_super(value: ast.expr) -> bool:
    return isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "super"


def _changed_by(node: ast.AST) -> list[ast.expr]:
    """Return the expression whose value a piece of code changes, if it does: of `items += [x]` that is items."""
    return [node.target] if isinstance(node, ast.AugAssign) else changed_parts(node)


def _is_of_library(called: ast.expr, caller: FunctionType) -> bool:
    """Say whether code calls a function of Python or of a library: a builtin, or an attribute of a global."""
    root = names_along(called)[0]
    return root != "self" and (root in vars(builtins) or root in caller.__globals__)


def _names_of_given(definition: Function, given: Iterable[str]) -> set[str]:
    """Return the names that stand for what some parameters hold, or for parts of it.

    A parameter to which something else is assigned, such as a copy, counts as that.
    """
    assigned = assigned_values(definition)
    names = {*given}
    names -= {name for name in names if any(names.isdisjoint(_roots(value)) for value in assigned.get(name, ()))}
    found = set[str]()
    while names != found:
        found = set(names)
        names |= {
            name for name, values in assigned.items() if any(not names.isdisjoint(_roots(value)) for value in values)
        }
    return names


def _roots(value: ast.expr) -> set[str]:
    """Return the names of which the value of an expression may be a part; what a call of a function gives is none."""
    if isinstance(value, ast.IfExp):
        return _roots(value.body) | _roots(value.orelse)
    if isinstance(value, ast.Starred):
        return _roots(value.value)
    if isinstance(value, (ast.BoolOp, ast.Tuple, ast.List)):
        parts = value.values if isinstance(value, ast.BoolOp) else value.elts
        return set[str]().union(*map(_roots, parts))
    if isinstance(value, ast.Call):
        is_part = isinstance(value.func, ast.Attribute) and value.func.attr in _GIVING_PARTS
        return _roots(value.func) if is_part else set()
    return {names_along(value)[0]} - {""}


def _conditional(statements: list[ast.stmt]) -> Iterator[ast.AST]:
    """Yield the nodes that a call may leave out: those in branches, and those after a branch that may end the call."""
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
