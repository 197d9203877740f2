"""Find where code looks up a key: `d[key]`, `key in d`, `d.get(key)`."""

from __future__ import annotations

import ast


def looked_up(node: ast.AST | None) -> tuple[ast.expr, ast.expr] | None:
    """Return the container and the key, where a node looks one up in the other; else None."""
    match node:
        case ast.Subscript(value=container, slice=key):
            return container, key
        case ast.Compare(left=key, ops=[ast.In() | ast.NotIn()], comparators=[container]):
            return container, key
        case ast.Call(func=ast.Attribute(value=container, attr="get" | "setdefault" | "pop"), args=[key, *_]):
            return container, key
        case _:
            return None
