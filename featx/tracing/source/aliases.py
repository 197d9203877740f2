"""Which parts of an expression its value may share memory with, or hold."""

from __future__ import annotations

import ast
from types import FunctionType

from featx.ir.form import FORM_ATTRIBUTES
from featx.tracing.source.calls import parts_returned

# Attributes of a tensor that are none, and hold none.
_NO_TENSORS = FORM_ATTRIBUTES | {"requires_grad", "names"}


def aliased_parts(node: ast.AST, function: FunctionType) -> list[ast.expr]:
    """Return the expressions inside `node` of which its value may be a view or an item, or which it may hold.

    Of `x[0].view(-1)` that is `x[0]`, of `[a, b]` and of `a if c else b` a and b, of `torch.squeeze(x)` x. A variable
    has none. `function` is the one in whose code `node` is.
    """
    match node:
        case ast.Attribute():
            return [] if node.attr in _NO_TENSORS else [node.value]
        case ast.Subscript() | ast.Starred() | ast.NamedExpr() | ast.Await() | ast.DictComp():
            return [node.value]
        case ast.Tuple() | ast.List() | ast.Set():
            return node.elts
        case ast.Dict() | ast.BoolOp():
            return node.values
        case ast.IfExp():
            return [node.body, node.orelse]
        case ast.BinOp():  # of lists
            return [each for each in (node.left, node.right) if _is_display(each)]
        case ast.ListComp() | ast.SetComp() | ast.GeneratorExp():
            return [node.elt]
        case ast.Call():
            return parts_returned(node, function)
        case _:
            return []


def _is_display(node: ast.expr) -> bool:
    return isinstance(node, (ast.Tuple, ast.List, ast.BinOp, ast.ListComp))
