"""Find code that takes a part of something between two bounds which it computes."""

from __future__ import annotations

import ast
import functools
from types import CodeType

from featx.tracing.source.frames import is_library_code
from featx.tracing.source.location import syntax_in

_MAKERS = ("slice", "islice")


@functools.lru_cache(maxsize=4096)
def has_computed_slices(code: CodeType) -> bool:
    """Say whether `code`, or code inside it, may take `items[a:b]` with two computed bounds, or make such a slice.

    `x[:, a:b]` takes no part of a list. Code of torch does not count. Without source: yes.
    """
    if is_library_code(code):
        return False
    syntax = syntax_in(code)
    if syntax is None:
        return True
    nodes = list(ast.walk(syntax))
    subscripts = [node.slice for node in nodes if isinstance(node, ast.Subscript)]
    written = [[each.lower, each.upper] for each in subscripts if isinstance(each, ast.Slice)]
    makers = [node for node in nodes if _name_of(node) in _MAKERS]
    calls = [node for node in nodes if isinstance(node, ast.Call) and node.func in makers]
    is_passed_on = len(calls) < len(makers)  # `map(slice, starts, ends)`
    return is_passed_on or any(map(_are_two_computed, (*written, *map(_bounds_in, calls))))


def _name_of(node: ast.AST) -> str | None:
    """Return the name of a variable, an attribute, or what is imported by another name."""
    match node:
        case ast.Name(name) | ast.Attribute(attr=name) | ast.alias(name=name, asname=str()):
            return name
        case _:
            return None


def _bounds_in(call: ast.Call) -> list[ast.expr | None]:
    """Return what may be a bound in a call of `slice` or `islice`, whose first argument is what it takes a part of."""
    return [*call.args[_name_of(call.func) == "islice" :], *(each.value for each in call.keywords)]


def _are_two_computed(bounds: list[ast.expr | None]) -> bool:
    return any(isinstance(each, ast.Starred) for each in bounds) or sum(map(_is_computed, bounds)) > 1


def _is_computed(bound: ast.expr | None) -> bool:
    if isinstance(bound, ast.UnaryOp):
        bound = bound.operand
    return bound is not None and not isinstance(bound, ast.Constant)
