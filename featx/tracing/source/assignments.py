"""What a piece of code assigns to its variables, in whatever order it runs."""

from __future__ import annotations

import ast
from collections.abc import Iterator


def assigned_values(function: ast.AST) -> dict[str, list[ast.expr]]:
    """Return, by variable, what code assigns to it, or to a tuple that it stands in. O(nodes).

    Of a loop `for x in items` that is `items`, and so in comprehensions; of `with f() as x` it is `f()`.
    """
    found: dict[str, list[ast.expr]] = {}
    for node in ast.walk(function):
        for target, value in _assignments_of(node):
            for name in _names_bound(target):
                found.setdefault(name, []).append(value)
    return found


def _names_bound(target: ast.expr) -> Iterator[str]:
    """Yield the variables that an assignment to `target` binds: not those of `rows[i] = value`."""
    if isinstance(target, ast.Name):
        yield target.id
    elif isinstance(target, ast.Starred):
        yield from _names_bound(target.value)
    elif isinstance(target, (ast.Tuple, ast.List)):
        for inner in target.elts:
            yield from _names_bound(inner)


def _assignments_of(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    if isinstance(node, ast.Assign):
        for target in node.targets:
            yield from _paired(target, node.value)
    elif isinstance(node, (ast.For, ast.AsyncFor, ast.comprehension)):
        yield from _of_loop(node.target, node.iter)
    elif isinstance(node, (ast.NamedExpr, ast.AnnAssign)) and node.value is not None:
        yield node.target, node.value
    elif isinstance(node, ast.withitem) and node.optional_vars is not None:
        yield node.optional_vars, node.context_expr


def _of_loop(target: ast.expr, iterated: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield what a loop assigns: of `for a, b in zip(x, y)` items of x to a, and of y to b."""
    if isinstance(iterated, ast.Call) and isinstance(iterated.func, ast.Name) and iterated.func.id == "zip":
        yield from _paired(target, ast.Tuple(iterated.args))
    else:
        yield target, iterated


def _paired(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield the parts of `a, b = x, y`, each with its own value; else both as they are."""
    targets: list[ast.expr] = getattr(target, "elts", [])
    values: list[ast.expr] = getattr(value, "elts", [])
    if not targets or len(targets) != len(values) or any(isinstance(each, ast.Starred) for each in (*targets, *values)):
        yield target, value
        return
    for each, its in zip(targets, values, strict=True):
        yield from _paired(each, its)
