"""Read a call in the source of a model: what it calls, what it may write, and what its result may be a part of."""

from __future__ import annotations

import ast
import builtins
import inspect
from types import FrameType, FunctionType, ModuleType
from typing import Any

from featx.ir.operator_facts import facts_of
from featx.tracing.objects.replaced_globals import global_of, original_of
from featx.tracing.source.frames import is_library_code
from featx.tracing.source.imports import imported_in

# Methods of Python's containers that give an item, or a container of the same items.
_OF_CONTAINERS = frozenset("values items get pop setdefault copy".split())
# Functions of Python that return an argument, or parts of it; classes such as `zip` and `map` are not among them.
_PASSING = (iter, next, getattr, vars, sorted)
# Classes whose objects hold no tensor.
_PLAIN = (bool, int, float, complex, str)


def name_called(node: ast.AST | None) -> str | None:
    """Return the name of the function or method that a call calls; None where it has none, as in `layers[0](x)`."""
    function = node.func if isinstance(node, ast.Call) else None
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else None


def values_given(call: ast.Call) -> list[ast.expr]:
    """Return the arguments of a call, by position and by name."""
    return [*call.args, *(each.value for each in call.keywords)]


def called_in(call: ast.Call, function: FunctionType) -> Any:
    """Return what a call in the code of `function` calls by a global or builtin name; None if that is unknown.

    Python modules and classes are followed: `torch.nn.functional.relu_`.
    """
    return _global_value(call.func, function)


def meant_at(expression: ast.expr, frame: FrameType) -> Any:
    """Return what a name, or a chain of attributes of Python modules, means at `frame`; None where that is unknown."""
    if isinstance(expression, ast.Attribute):
        owner = meant_at(expression.value, frame)
        return original_of(vars(owner).get(expression.attr)) if isinstance(owner, ModuleType) else None
    if not isinstance(expression, ast.Name):
        return None
    code, name = frame.f_code, expression.id
    if name in (*code.co_varnames, *code.co_cellvars, *code.co_freevars):
        return original_of(frame.f_locals.get(name))
    return original_of(frame.f_globals.get(name, getattr(builtins, name, None)))


def written_by_call(call: ast.Call, function: FunctionType) -> list[ast.expr]:
    """Return the expressions whose values a call of torch in the code of `function` may write in place.

    That is x in `x.add_(1)`, every argument in `torch.relu_(x)` and `nn.init.zeros_(x)`, and what is given as `out`.
    """
    out = [each.value for each in call.keywords if each.arg == "out"]
    name, owner = name_called(call) or "", _owner_of_method(call, function)
    writes_first = facts_of(name).writes_first
    if owner is not None:
        return [*out, owner] if writes_first else out
    called = called_in(call, function)
    if is_own_function(called):  # its lines are read
        return out
    is_inplace = writes_first or (called is not None and name.endswith("_") and not name.endswith("__"))
    return values_given(call) if is_inplace else out


def parts_returned(call: ast.Call, function: FunctionType) -> list[ast.expr]:
    """Return the expressions of which the result of a call in the code of `function` may be a view, or hold a part.

    That is x in `x.view(-1)`, and the arguments of `torch.transpose(x, 0, 1)`, of a class, and of a function that is
    not torch's. Of methods of the model nothing is known here.
    """
    name, owner = name_called(call) or "", _owner_of_method(call, function)
    is_alias = facts_of(name).may_be_view
    if owner is not None:
        return [owner] if is_alias or name in _OF_CONTAINERS else []
    called = called_in(call, function)
    if isinstance(called, type):
        return [] if called in _PLAIN else values_given(call)
    is_passed = is_own_function(called) or any(called is each for each in _PASSING)
    is_alias = is_alias or is_passed or any(map(sets_inplace, call.keywords)) or bool(written_by_call(call, function))
    return values_given(call) if is_alias else []


def sets_inplace(keyword: ast.keyword) -> bool:
    """Say whether an argument of a call is `inplace`, and not the constant False."""
    is_off = isinstance(keyword.value, ast.Constant) and not keyword.value.value
    return keyword.arg == "inplace" and not is_off


def is_own_function(called: object) -> bool:
    """Say whether something is a Python function that is neither featx's, torch's nor Python's."""
    return isinstance(called, FunctionType) and not is_library_code(called.__code__)


def _owner_of_method(call: ast.Call, function: FunctionType) -> ast.expr | None:
    """Return x in `x.add_(1)`; None for a call of a function, such as `torch.add(x, 1)`, `torch.Tensor.add(x, 1)`."""
    if not isinstance(call.func, ast.Attribute):
        return None
    owner = call.func.value
    return None if isinstance(_global_value(owner, function), (ModuleType, type)) else owner


def _global_value(node: ast.expr, function: FunctionType) -> Any:
    if isinstance(node, ast.Name):
        code = function.__code__
        if node.id in code.co_varnames or node.id in code.co_cellvars:
            return imported_in(function).get(node.id)
        return None if node.id in code.co_freevars else global_of(function, node.id, getattr(builtins, node.id, None))
    if not isinstance(node, ast.Attribute):
        return None
    owner = _global_value(node.value, function)
    if isinstance(owner, ModuleType):
        return vars(owner).get(node.attr)
    return inspect.getattr_static(owner, node.attr, None) if isinstance(owner, type) else None
