"""Read from the source of a model what it does with a number or an array of numpy that it is about to get.

A trace stands in for both with objects of its own, which code can tell from those of numpy: `isinstance(n, int)` holds
for what stands in for an int of numpy. So it does that where the source shows that the value goes, at once, through a
local variable or to the caller, into nothing but arithmetic, comparisons, and calls that do not ask. It does not do so
where there is no source.
"""

from __future__ import annotations

import ast
import inspect
import math
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from featx.ir.torch_layers import is_torch_layer
from featx.tracing.objects.arrays import REDUCTIONS, is_ufunc
from featx.tracing.objects.replaced_globals import original_of
from featx.tracing.source.calls import meant_at
from featx.tracing.source.frames import is_library_code
from featx.tracing.source.location import loads_of_local, node_at, parent_of

_ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow)
_COMPARISONS = (ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE)
# Functions of Python that make a number of Python of one of numpy, or do not ask for its class; those of `math` as they
# are on import, which a trace replaces.
_OF_NUMBERS = (int, float, range, abs, print, *filter(callable, vars(math).values()))
# Functions of torch that call others.
_CALLING = frozenset({"cond", "compile", "vmap", "while_loop", "multi_head_attention_forward"})
# What is followed of arrays.
_ATTRIBUTES_OF_ARRAYS = frozenset({"ndim", "shape", "size", "all", "any", "astype", "copy", "tolist", *REDUCTIONS})
_FUNCTIONS_OF_ARRAYS = frozenset({"all", "any", "array_equal", *REDUCTIONS})
# Flags of the code of generators and coroutines, whose values go to other code than that which calls them.
_SUSPENDED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR

# A value, and the syntax around it.
_Use = tuple[ast.AST, ast.AST]
_IsUse = Callable[[ast.AST, ast.AST, FrameType], bool]
_UNKNOWN: _Use = (ast.Pass(), ast.Pass())


def is_used_as_number(frame: FrameType) -> bool:
    """Say whether the class of the number that `frame` is about to get does not matter for what it does with it."""
    return _is_used(node_at(frame), frame, _is_use_of_number)


def is_used_as_array(frame: FrameType) -> bool:
    """Say whether `frame` only computes with the array of numpy that it is about to get, or takes its items."""
    return _is_used(node_at(frame), frame, _is_use_of_array)


def _is_used(node: ast.AST | None, frame: FrameType, is_use: _IsUse) -> bool:
    for value, parent in _uses_of(node, frame):
        if isinstance(parent, (ast.Return, ast.Lambda)):
            caller = frame.f_back
            if caller is None or frame.f_code.co_flags & _SUSPENDED or is_library_code(caller.f_code):
                return False
            if not _is_used(node_at(caller), caller, is_use):
                return False
        elif not is_use(value, parent, frame):
            return False
    return True


def _uses_of(node: ast.AST | None, frame: FrameType) -> list[_Use]:
    """Return the places that use a value, each with the syntax around it; that of a statement if one is not known."""
    parent = None if node is None else parent_of(node, frame)
    while isinstance(parent, ast.IfExp) and parent.test is not node:
        node, parent = parent, parent_of(parent, frame)
    if node is None or parent is None:
        return [_UNKNOWN]
    target = _name_assigned(node, parent)
    return [(node, parent)] if target is None else _uses_of_name(target, frame)


def _name_assigned(node: ast.AST, parent: ast.AST) -> ast.Name | None:
    """Return the name that a statement gives to a value, if that is all that it does with it."""
    if isinstance(node, ast.AugAssign):
        targets: list[ast.expr] = [node.target]
    elif isinstance(parent, ast.AnnAssign) and parent.value is node:
        targets = [parent.target]
    else:
        targets = parent.targets if isinstance(parent, ast.Assign) and parent.value is node else []
    return targets[0] if len(targets) == 1 and isinstance(targets[0], ast.Name) else None


def _uses_of_name(target: ast.expr, frame: FrameType) -> list[_Use]:
    """Return the places that use a local variable; one that functions inside read too is not known."""
    loads = loads_of_local(target, frame)
    if loads is None or not isinstance(target, ast.Name) or target.id in frame.f_code.co_cellvars:
        return [_UNKNOWN]
    return [*loads, *((each.target, each) for each in _updates_of(target, frame))]


def _updates_of(target: ast.Name, frame: FrameType) -> list[ast.AugAssign]:
    around: ast.AST | None = target
    while around is not None and not isinstance(around, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
        around = parent_of(around, frame)
    nodes = [] if around is None else [each for each in ast.walk(around) if isinstance(each, ast.AugAssign)]
    return [each for each in nodes if isinstance(each.target, ast.Name) and each.target.id == target.id]


# -- numbers -------------------------------------------------------------------------------------------------------


def _is_use_of_number(value: ast.AST, parent: ast.AST, frame: FrameType) -> bool:
    match parent:
        case ast.AugAssign() | ast.BinOp():  # what it gives is asked about when it is computed
            return _is_arithmetic(value, parent, frame)
        case ast.UnaryOp():
            return isinstance(parent.op, (ast.USub, ast.UAdd, ast.Not))
        case ast.Compare():
            return all(isinstance(each, _COMPARISONS) for each in parent.ops)
        case ast.If() | ast.While() | ast.IfExp():
            return parent.test is value
        case ast.FormattedValue():
            return parent.conversion == -1
        case ast.Attribute():
            return parent.attr in ("astype", "item") and isinstance(parent.ctx, ast.Load)
        case _:
            return _is_argument(value, parent, frame)


def _is_arithmetic(value: ast.AST, parent: ast.AugAssign | ast.BinOp, frame: FrameType) -> bool:
    if not isinstance(parent.op, _ARITHMETIC):
        return False
    left = parent.target if isinstance(parent, ast.AugAssign) else parent.left
    return left is value or _may_be_number(left, frame, is_formatting=isinstance(parent.op, ast.Mod))


def _may_be_number(left: ast.expr, frame: FrameType, *, is_formatting: bool) -> bool:
    """Say whether the operand to the left of a value is no text, and as far as it is a name, no object of a class."""
    if isinstance(left, ast.Constant):
        return isinstance(left.value, (int, float))
    if not isinstance(left, ast.Name):
        return not isinstance(left, ast.JoinedStr) and not (is_formatting and isinstance(left, ast.Attribute))
    numpy = sys.modules["numpy"]
    known = frame.f_locals.get(left.id, frame.f_globals.get(left.id))
    return isinstance(known, (int, float, torch.Tensor, numpy.ndarray, numpy.generic))


def _is_argument(value: ast.AST, parent: ast.AST | None, frame: FrameType) -> bool:
    """Say whether a value, or a sequence with it, is an argument of a call that takes numbers, or an index."""
    while isinstance(parent, (ast.Tuple, ast.List, ast.Starred, ast.keyword, ast.Slice)):
        value, parent = parent, parent_of(parent, frame)
    if isinstance(parent, ast.Subscript):
        return parent.slice is value and (_is_tensor(parent.value, frame) or _is_sequence(parent.value, frame))
    return isinstance(parent, ast.Call) and parent.func is not value and _takes_numbers(parent.func, frame)


def _takes_numbers(function: ast.expr, frame: FrameType) -> bool:
    """Say whether a call takes a number of numpy as one of Python: `int(n)`, `x.view(n)`, `torch.zeros(n)`."""
    called = meant_at(function, frame)
    if called is None:
        return isinstance(function, ast.Attribute) and _is_method_of_tensor(function, frame)
    return _is_of_torch(called) or is_ufunc(called) or any(called is each for each in _OF_NUMBERS)


def _is_of_torch(called: Any) -> bool:
    """Say whether a function is one of torch that calls no code of the model."""
    name = getattr(called, "__name__", "")
    places = (vars(torch).get(name), vars(torch.nn.functional).get(name))
    return not isinstance(called, type) and any(called is each for each in places) and name not in _CALLING


def _is_tensor(expression: ast.expr, frame: FrameType) -> bool:
    """Say whether an expression gives a tensor: a name of one, and what torch makes of it."""
    match expression:
        case ast.BinOp():
            return _is_tensor(expression.left, frame) or _is_tensor(expression.right, frame)
        case ast.Subscript():
            return _is_tensor(expression.value, frame)
        case ast.Call(func=ast.Attribute() as function) if meant_at(function, frame) is None:
            is_layer = is_torch_layer(type(_known_value(function, frame)))
            return is_layer or _is_method_of_tensor(function, frame)
        case ast.Call():
            return _is_of_torch(meant_at(expression.func, frame))
        case _:
            return isinstance(_known_value(expression, frame), torch.Tensor)


def _is_method_of_tensor(function: ast.Attribute, frame: FrameType) -> bool:
    return hasattr(torch.Tensor, function.attr) and _is_tensor(function.value, frame)


def _is_sequence(expression: ast.expr, frame: FrameType) -> bool:
    return type(_known_value(expression, frame)) in (list, tuple)


def _known_value(expression: ast.expr, frame: FrameType) -> Any:
    """Return the present value of a name, or of an attribute of a module; None where that is unknown."""
    if not isinstance(expression, ast.Attribute):
        return meant_at(expression, frame)
    owner = _known_value(expression.value, frame)
    if not isinstance(owner, torch.nn.Module):
        return None
    held = (owner.__dict__, owner._parameters, owner._buffers, owner._modules)
    return next((each[expression.attr] for each in held if expression.attr in each), None)


# -- arrays --------------------------------------------------------------------------------------------------------


def _is_use_of_array(value: ast.AST, parent: ast.AST, frame: FrameType) -> bool:
    match parent:
        case ast.BinOp():
            return _is_arithmetic(value, parent, frame)
        case ast.UnaryOp():
            return isinstance(parent.op, (ast.USub, ast.UAdd))
        case ast.Compare():
            return all(isinstance(each, _COMPARISONS) for each in parent.ops)
        case ast.Subscript():  # an item is asked about when it is taken
            return parent.value is value and isinstance(parent.ctx, ast.Load)
        case ast.Attribute():
            return parent.attr in _ATTRIBUTES_OF_ARRAYS and isinstance(parent.ctx, ast.Load)
        case ast.FormattedValue():
            return parent.conversion == -1
        case ast.Starred():
            return _is_argument(value, parent, frame)
        case ast.Call():
            return parent.func is not value and _takes_array(parent, frame)
        case _:
            targets = _targets_of_items(value, parent)
            uses = (use for target in targets for use in _uses_of_item(target, parent, frame))
            return bool(targets) and all(_is_use_of_number(*use, frame) for use in uses)


def _takes_array(call: ast.Call, frame: FrameType) -> bool:
    """Say whether an array is an argument of a function that is followed, or made into a sequence for torch."""
    called = meant_at(call.func, frame)
    if called is tuple or called is list:
        return _is_used(call, frame, _is_argument)
    if call.keywords or called is len:
        return called is len
    if is_ufunc(called):
        return len(call.args) == called.nin
    name = getattr(called, "__name__", "")
    is_of_numpy = original_of(vars(sys.modules["numpy"]).get(name)) is called
    return is_of_numpy and name in _FUNCTIONS_OF_ARRAYS and len(call.args) == 1 + (name == "array_equal")


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
