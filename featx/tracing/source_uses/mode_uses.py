"""Read from the source of a model whether code that asks for a mode only chooses by it how much dropout there is.

Then train and eval mode differ in arguments of dropout alone, and what is found out in one of them, such as the sizes
for which the graph holds, is true of the other.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from types import FrameType, FunctionType
from typing import Any

from featx.ir.operator_facts import facts_of
from featx.tracing.source.calls import called_in, is_own_function, meant_at, name_called
from featx.tracing.source.location import (
    BY_NAME,
    definition_of,
    loads_in,
    loads_of_local,
    node_at,
    parent_of,
    source_of,
)

# How far a value is followed from function to function.
_MOST_CALLS = 4
# Returns the places that read a local variable, or None where there may be others.
_Loads = Callable[[ast.expr], "list[tuple[ast.AST, ast.AST]] | None"]


def chooses_dropout(frame: FrameType) -> bool:
    """Say whether the mode that `frame` reads says nothing but how much dropout there is.

    It is passed to dropout of torch, `F.dropout(x, p, self.training)`, or it chooses between two plain values,
    `self.p if self.training else 0.0`, that are. The value is followed through a local variable, and into functions
    that pass it on in the same way. Without source: no.
    """
    node = node_at(frame)
    parent = None if node is None else parent_of(node, frame)
    code = _Code(
        called=lambda call: meant_at(call.func, frame),
        parent=lambda each: parent_of(each, frame),
        loads=lambda target: loads_of_local(target, frame),
        is_closed_over=lambda name: name in frame.f_code.co_cellvars,
    )
    if node is not None and isinstance(parent, ast.UnaryOp) and isinstance(parent.op, ast.Not):
        node, parent = parent, code.parent(parent)
    if node is None:
        return False
    if isinstance(parent, ast.IfExp) and parent.test is node:
        return all(map(_is_plain, (parent.body, parent.orelse))) and code.is_for_dropout(parent)
    return code.is_for_dropout(node)


class _Code:
    """The code of one function in which a value is followed.

    Args:
        called: returns what a call calls; None where that is unknown.
        parent: returns the syntax around a node.
        loads: returns the places that read a local variable, each with the syntax around it; None if not known.
        is_closed_over: says whether functions inside read a variable too.
        depth: how many calls led here.
    """

    def __init__(
        self,
        called: Callable[[ast.Call], Any],
        parent: Callable[[ast.AST], ast.AST | None],
        loads: _Loads,
        is_closed_over: Callable[[str], bool],
        depth: int = 0,
    ) -> None:
        self._called = called
        self.parent = parent
        self._loads = loads
        self._is_closed_over = is_closed_over
        self._depth = depth

    def is_for_dropout(self, value: ast.AST) -> bool:
        """Say whether a value goes into arguments of dropout alone."""
        parent = self.parent(value)
        if isinstance(parent, ast.keyword):
            call = self.parent(parent)
            return isinstance(call, ast.Call) and self._takes(call, parent.arg)
        if isinstance(parent, ast.Call) and value in parent.args:
            is_plain = not any(isinstance(each, ast.Starred) for each in parent.args)
            return is_plain and self._takes(parent, parent.args.index(value))  # pyright: ignore[reportArgumentType]
        targets = parent.targets if isinstance(parent, ast.Assign) and parent.value is value else []
        return len(targets) == 1 and self.are_for_dropout(targets[0])

    def are_for_dropout(self, target: ast.expr) -> bool:
        """Say whether all that reads a local variable passes it to dropout."""
        loads = self._loads(target)
        if loads is None or self._is_closed_over(getattr(target, "id", "")):
            return False
        return all(self.is_for_dropout(load) for load, _ in loads)

    def _takes(self, call: ast.Call, argument: int | str | None) -> bool:
        """Say whether an argument of a call, by position or name, says how much dropout there is."""
        called = self._called(call)
        if str(getattr(called, "__module__", "")).partition(".")[0] == "torch":
            return argument in _arguments_of_dropout(name_called(call) or "")
        if not is_own_function(called) or self._depth == _MOST_CALLS:
            return False
        return _passes_on(called, argument, self._depth + 1)


def _arguments_of_dropout(name: str) -> tuple[int | str, ...]:
    facts = facts_of(name)
    if facts.dropout_at is not None:
        return (facts.dropout_at, "dropout_p")
    return (1, "p", facts.training_at, "training") if facts.training_at is not None and "dropout" in name else ()


def _passes_on(function: FunctionType, argument: int | str | None, depth: int) -> bool:
    """Say whether all that a function does with an argument is to pass it to dropout."""
    definition, source = definition_of(function), source_of(function.__code__, function.__globals__)
    if definition is None or source is None or hasattr(function, "__wrapped__"):
        return False
    code = function.__code__
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    name = names[argument] if isinstance(argument, int) and argument < code.co_argcount else argument
    if not isinstance(name, str) or name not in names or not BY_NAME.isdisjoint(code.co_names):
        return False
    inner = _Code(
        called=lambda call: called_in(call, function),
        parent=source.parents.get,
        loads=lambda target: loads_in(definition, source, target),
        is_closed_over=lambda each: each in code.co_cellvars,
        depth=depth,
    )
    return inner.are_for_dropout(ast.Name(name, ast.Load()))


def _is_plain(value: ast.expr) -> bool:
    """Say whether an expression is a constant, a name, or a chain of attributes."""
    while isinstance(value, ast.Attribute):
        value = value.value
    return isinstance(value, (ast.Constant, ast.Name))
