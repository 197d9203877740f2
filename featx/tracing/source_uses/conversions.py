"""Tell where `int`, `float` and `len` may be replaced under their names for the time of a trace.

A call of them on a traced number or tensor gives a plain number, and there is nothing but the name to take hold of it
by. But a name is also read for other reasons: `type(x) is int` would no longer hold. `type(x) == int` holds: what
stands under the name is equal to what it replaces.
"""

from __future__ import annotations

import ast
import functools
import linecache
import sys
from collections.abc import Iterator
from typing import Any

from featx.tracing.source.location import parse

CONVERSIONS = ("int", "float", "len")
_NUMPY = ("np", "numpy")
_BY_EQUALITY = (ast.Eq, ast.NotEq, ast.In, ast.NotIn)


def converts_by_calls_alone(filename: str, namespace: dict[str, Any]) -> bool:
    """Say whether all functions in the file with these globals use these names where it does not matter.

    That is for calls, in isinstance(), in comparisons by equality (`type(x) in (int, float)`), and as dtypes of numpy.

    Parses the file, once.
    """
    return _converts_by_calls_alone("".join(linecache.getlines(filename, namespace)))


@functools.lru_cache(maxsize=256)  # a trace asks at each conversion of a number
def _converts_by_calls_alone(text: str) -> bool:
    file = parse(text)
    if file is None:
        return False
    nodes = list(ast.walk(file))
    harmless = {id(name) for node in nodes for use in _harmless_uses(node) for name in _conversions_in(use)}
    used = [name for node in nodes for part in _body_of(node) for name in _conversions_in(part)]
    return not any(map(_is_redefinition, nodes)) and bool(used) and all(id(name) in harmless for name in used)


def _body_of(node: ast.AST) -> list[ast.AST]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return list(node.body)
    return [node.body] if isinstance(node, ast.Lambda) else []


def _conversions_in(node: ast.AST) -> Iterator[ast.Name]:
    return (each for each in ast.walk(node) if isinstance(each, ast.Name) and each.id in CONVERSIONS)


def _harmless_uses(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        if node.func.id in CONVERSIONS:
            yield node.func
        elif node.func.id == "isinstance":
            yield from node.args[1:]
        elif node.func.id == "map" and isinstance(node.args[0], ast.Name):
            yield node.args[0]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        yield from _dtypes_for_numpy(node, node.func)
    elif isinstance(node, ast.Compare) and all(isinstance(each, _BY_EQUALITY) for each in node.ops):
        yield from filter(_is_of_names, (node.left, *node.comparators))
    # Annotations inside functions: those of local names are not evaluated, and the others do not matter.
    elif isinstance(node, (ast.AnnAssign, ast.arg)) and node.annotation is not None:
        yield node.annotation
    elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.returns is not None:
        yield node.returns


def _dtypes_for_numpy(call: ast.Call, function: ast.Attribute) -> Iterator[ast.AST]:
    """Yield what `array.astype(int)` and `np.zeros(n, dtype=int)` take for a dtype. Numpy asks it for its `dtype`."""
    is_of_numpy = isinstance(function.value, ast.Name) and function.value.id in _NUMPY
    named = [each.value for each in call.keywords if each.arg == "dtype"]
    yield from named if is_of_numpy else []
    yield from [*call.args[:1], *named] if function.attr == "astype" else []


def _is_of_names(node: ast.AST) -> bool:
    """Say whether an expression is a name, or a tuple or list of names."""
    if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        return all(map(_is_of_names, node.elts))
    return isinstance(node, (ast.Name, ast.Attribute))


def _is_redefinition(node: ast.AST) -> bool:
    if isinstance(node, ast.Name):
        return node.id in CONVERSIONS and not isinstance(node.ctx, ast.Load)
    if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
        return _may_give_a_conversion(node)
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return any((alias.asname or alias.name) in CONVERSIONS for alias in node.names)
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return node.name in CONVERSIONS
    return isinstance(node, ast.arg) and node.arg in CONVERSIONS


def _may_give_a_conversion(node: ast.ImportFrom) -> bool:
    """Say whether `from module import *` may give a name such as `int` another meaning: `from math import *` does not.

    A module that the file has imported is among those of Python, but for one that is named relative to the file.
    """
    module = None if node.level else sys.modules.get(node.module or "")
    if module is None:
        return True
    names = getattr(module, "__all__", None)
    return any(name in CONVERSIONS for name in (vars(module) if names is None else names))
