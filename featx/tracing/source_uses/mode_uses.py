"""Read from the source of a model whether code that asks for a mode only chooses by it how much dropout there is.

Then train and eval mode differ in arguments of dropout alone, and what is found out in one of them, such as the sizes
for which the graph holds, is true of the other.
"""

from __future__ import annotations

import ast
from types import FrameType

from featx.ir.operator_facts import facts_of
from featx.tracing.source.calls import meant_at, name_called
from featx.tracing.source.location import node_at, parent_of


def chooses_dropout(frame: FrameType) -> bool:
    """Say whether the mode that `frame` reads goes into dropout of torch, or chooses between two values for dropout.

    `F.dropout(x, p, self.training)`, and `self.p if self.training else 0.0` that is assigned to a name or passed as an
    argument with "drop" in its name. Without source: no.
    """
    node = node_at(frame)
    parent = None if node is None else parent_of(node, frame)
    if node is None or parent is None:
        return False
    if isinstance(parent, ast.keyword):
        call = parent_of(parent, frame)
        return parent.arg == "training" and isinstance(call, ast.Call) and _is_dropout(call, frame)
    if isinstance(parent, ast.Call):
        return parent.func is not node and _is_dropout(parent, frame)
    if isinstance(parent, ast.UnaryOp) and isinstance(parent.op, ast.Not):
        node, parent = parent, parent_of(parent, frame)
    if not isinstance(parent, ast.IfExp) or parent.test is not node:
        return False
    return all(map(_is_plain, (parent.body, parent.orelse))) and _is_for_dropout(parent, frame)


def _is_dropout(call: ast.Call, frame: FrameType) -> bool:
    name = name_called(call) or ""
    called = meant_at(call.func, frame)
    is_of_torch = str(getattr(called, "__module__", "")).partition(".")[0] == "torch"
    return is_of_torch and "dropout" in name and facts_of(name).training_at is not None


def _is_plain(value: ast.expr) -> bool:
    """Say whether an expression is a constant, a name, or a chain of attributes."""
    while isinstance(value, ast.Attribute):
        value = value.value
    return isinstance(value, (ast.Constant, ast.Name))


def _is_for_dropout(choice: ast.IfExp, frame: FrameType) -> bool:
    parent = parent_of(choice, frame)
    if isinstance(parent, ast.keyword):
        return "drop" in (parent.arg or "")
    targets = parent.targets if isinstance(parent, ast.Assign) else []
    return len(targets) == 1 and isinstance(targets[0], ast.Name) and "drop" in targets[0].id
