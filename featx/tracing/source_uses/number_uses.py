"""Read from the source of a model what it does with a number or an array of numpy that it is about to get.

A trace stands in for both with objects of its own, which code can tell from those of numpy: `isinstance(n, int)` holds
for what stands in for an int of numpy. So it does that where the source shows that the value goes, at once or through
a local variable, into nothing but arithmetic, comparisons, and calls that do not ask. Without source: no.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Iterator
from types import FrameType, ModuleType

import torch

from featx.tracing.objects.replaced_globals import original_of
from featx.tracing.source.calls import meant_at
from featx.tracing.source.frames import is_library_code
from featx.tracing.source.location import loads_of_local, node_at, parent_of

_ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow)
_COMPARISONS = (ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE)
# What makes a number of Python of one of numpy, or does not ask for its class.
_OF_NUMBERS = (int, float, range, abs, print)
# Methods and functions of arrays that are followed.
_METHODS_OF_ARRAYS = frozenset({"all", "any", "astype", "copy", "max", "mean", "min", "prod", "sum", "tolist"})
_ATTRIBUTES_OF_ARRAYS = frozenset({"ndim", "shape", "size", *_METHODS_OF_ARRAYS})
_FUNCTIONS_OF_ARRAYS = frozenset(
    ("abs", "absolute", "all", "amax", "amin", "any", "array_equal", "ceil", "floor", "max", "maximum", "mean", "min")
    + ("minimum", "prod", "rint", "sqrt", "sum", "trunc")
)
# Flags of the code of generators and coroutines, whose values go to other code than that which calls them.
_SUSPENDED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
# A value, and the syntax around it.
_Use = tuple[ast.AST, ast.AST]
_UNKNOWN: _Use = (ast.Pass(), ast.Pass())


def is_used_as_number(frame: FrameType) -> bool:
    """Say whether the class of the number that `frame` is about to get does not matter for what it does with it."""
    return _is_used(frame, _is_use_of_number)


def is_used_as_array(frame: FrameType) -> bool:
    """Say whether `frame` only computes with the array of numpy that it is about to get, or takes its items."""
    return _is_used(frame, _is_use_of_array)


def _is_used(frame: FrameType, is_use: Callable[[ast.AST, ast.AST, FrameType], bool]) -> bool:
    for value, parent in _uses_of(node_at(frame), frame):
        if isinstance(parent, (ast.Return, ast.Lambda)):
            caller = frame.f_back
            if caller is None or frame.f_code.co_flags & _SUSPENDED or is_library_code(caller.f_code):
                return False
            if not _is_used(caller, is_use):
                return False
        elif not is_use(value, parent, frame):
            return False
    return True


def _uses_of(node: ast.AST | None, frame: FrameType) -> list[_Use]:
    """Return the places that use a value, each with the syntax around it; that of a statement if one is not known."""
    parent = None if node is None else parent_of(node, frame)
    if node is None or parent is None:
        return [_UNKNOWN]
    target = _name_assigned(node, parent)
    return [(node, parent)] if target is None else _uses_of_name(target, frame)


def _uses_of_name(target: ast.expr, frame: FrameType) -> list[_Use]:
    loads = loads_of_local(target, frame)
    if loads is None or not isinstance(target, ast.Name):
        return [_UNKNOWN]
    return [*loads, *((each.target, each) for each in _updates_of(target, frame))]


def _updates_of(target: ast.Name, frame: FrameType) -> Iterator[ast.AugAssign]:
    around: ast.AST | None = target
    while around is not None and not isinstance(around, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
        around = parent_of(around, frame)
    for node in () if around is None else ast.walk(around):
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name) and node.target.id == target.id:
            yield node


def _name_assigned(node: ast.AST, parent: ast.AST) -> ast.Name | None:
    """Return the name that a statement gives to a value, if that is all that it does with it."""
    if isinstance(node, ast.AugAssign):
        return node.target if isinstance(node.target, ast.Name) else None
    targets = parent.targets if isinstance(parent, ast.Assign) and parent.value is node else []
    return targets[0] if len(targets) == 1 and isinstance(targets[0], ast.Name) else None


def _is_use_of_number(value: ast.AST, parent: ast.AST | None, frame: FrameType) -> bool:
    if isinstance(parent, ast.AugAssign):
        return isinstance(parent.op, _ARITHMETIC)
    if isinstance(parent, ast.BinOp):  # what it gives is asked about when it is computed
        return isinstance(parent.op, _ARITHMETIC) and not _is_text(parent.left)
    if isinstance(parent, ast.UnaryOp):
        return isinstance(parent.op, (ast.USub, ast.UAdd, ast.Not))
    if isinstance(parent, ast.Compare):
        return all(isinstance(each, _COMPARISONS) for each in parent.ops)
    if isinstance(parent, (ast.If, ast.While, ast.IfExp)):
        return parent.test is value
    if isinstance(parent, ast.FormattedValue):
        return parent.conversion == -1
    if isinstance(parent, ast.Attribute):
        return parent.attr in ("astype", "item")
    while isinstance(parent, (ast.Tuple, ast.List, ast.Starred, ast.keyword, ast.Slice)):
        value, parent = parent, parent_of(parent, frame)
    if isinstance(parent, ast.Subscript):
        return parent.slice is value
    return isinstance(parent, ast.Call) and parent.func is not value and _takes_numbers(parent.func, frame)


def _takes_numbers(function: ast.expr, frame: FrameType) -> bool:
    """Say whether a call takes a number of numpy as one of Python: `int(n)`, `x.view(n)`, `torch.zeros(n)`."""
    called = meant_at(function, frame)
    if isinstance(function, ast.Attribute):
        owner = meant_at(function.value, frame)
        name = owner.__name__ if isinstance(owner, ModuleType) else None
        return hasattr(torch.Tensor, function.attr) if name is None else name.partition(".")[0] == "torch"
    is_of_torch = str(getattr(called, "__module__", "")).partition(".")[0] == "torch" and not isinstance(called, type)
    return is_of_torch or any(called is each for each in _OF_NUMBERS)


def _is_use_of_array(value: ast.AST, parent: ast.AST, frame: FrameType) -> bool:
    if isinstance(parent, ast.BinOp):
        return isinstance(parent.op, _ARITHMETIC) and not _is_text(parent.left)
    if isinstance(parent, ast.UnaryOp):
        return isinstance(parent.op, (ast.USub, ast.UAdd))
    if isinstance(parent, ast.Compare):
        return all(isinstance(each, _COMPARISONS) for each in parent.ops)
    if isinstance(parent, ast.Subscript):  # an item is asked about when it is taken
        return parent.value is value and isinstance(parent.ctx, ast.Load)
    if isinstance(parent, ast.Attribute):
        return parent.attr in _ATTRIBUTES_OF_ARRAYS
    if isinstance(parent, ast.FormattedValue):
        return parent.conversion == -1
    if isinstance(parent, ast.Starred):
        return _is_use_of_number(value, parent, frame)
    if isinstance(parent, ast.Call) and parent.func is not value:
        makes_sequence = any(meant_at(parent.func, frame) is each for each in (tuple, list))
        is_of_numbers = makes_sequence and all(_is_use_of_number(*use, frame) for use in _uses_of(parent, frame))
        return is_of_numbers or _takes_arrays(parent.func, frame)
    targets = _targets_of_items(value, parent)
    return bool(targets) and all(
        _is_use_of_number(*use, frame) for target in targets for use in _uses_of_item(target, parent, frame)
    )


def _takes_arrays(function: ast.expr, frame: FrameType) -> bool:
    called = meant_at(function, frame)
    name = getattr(called, "__name__", "")
    return name in _FUNCTIONS_OF_ARRAYS and original_of(vars(sys.modules["numpy"]).get(name)) is called


def _targets_of_items(value: ast.AST, parent: ast.AST) -> list[ast.expr]:
    """Return the targets to which the items of an array are assigned, `a, b = array` or `for a in array`; else none."""
    if isinstance(parent, ast.Assign) and len(parent.targets) == 1 and parent.value is value:
        target = parent.targets[0]
        return target.elts if isinstance(target, (ast.Tuple, ast.List)) else []
    return [parent.target] if isinstance(parent, (ast.For, ast.comprehension)) and parent.iter is value else []


def _uses_of_item(target: ast.expr, parent: ast.AST, frame: FrameType) -> list[_Use]:
    if not isinstance(parent, ast.comprehension):
        return _uses_of_name(target, frame)
    around = parent_of(parent, frame)  # the name is one of the comprehension's own
    names = [] if around is None else [each for each in ast.walk(around) if isinstance(each, ast.Name)]
    loads = [each for each in names if isinstance(each.ctx, ast.Load) and each.id == getattr(target, "id", None)]
    return [(each, parent_of(each, frame) or each) for each in loads] or [_UNKNOWN]


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes)))
