"""What the line of the model that runs asks of a traced value, or does with it, read from its source.

Without source, each question has a conservative answer. A version of Python that featx was not tested with
can only lead there too: where its positions are others, no syntax of the kind that is asked for stands at them.
"""

from __future__ import annotations

import ast
import functools
from types import FrameType
from typing import Any, NamedTuple

import torch

from featx.tracing.source.calls import name_called
from featx.tracing.source.frames import is_library_code
from featx.tracing.source.location import loads_of_local, node_at, parent_of, source_of

# What answers `isinstance(x, nn.Parameter)`, in Python and for its caller.
_PARAMETER_CHECK = type(torch.nn.Parameter).__instancecheck__.__code__
_BINARY: dict[type[ast.operator], str] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.MatMult: "@", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%",
    ast.Pow: "**", ast.LShift: "<<", ast.RShift: ">>", ast.BitAnd: "&", ast.BitOr: "|", ast.BitXor: "^",
}  # fmt: skip
_SIGNS: dict[type[ast.unaryop], str] = {ast.USub: "-", ast.UAdd: "+"}
_COMPARISONS = (ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE)
# What a text passes through on its way into a call: `"n = %d" % n`, `f"{n}" + "."`, `(a, b)` of `"%d %d" % (a, b)`.
_PARTS_OF_A_TEXT = (ast.JoinedStr, ast.FormattedValue, ast.BinOp, ast.Tuple)
_TRIES = (ast.Try, ast.TryStar)
# An error of these classes comes for all inputs of the same types, or for none.
_ERRORS_OF_TYPES = frozenset({"TypeError", "AttributeError", "NameError", "ImportError", "ModuleNotFoundError"})
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)


def unpacked_count(frame: FrameType) -> int | None:
    """Return n where `frame` is at the unpacking of a value into n names, `a, b = value`.

    None elsewhere, and without source: no count is known then.
    """
    return _names_in(node_at(frame))


def _names_in(target: ast.AST | None) -> int | None:
    if not isinstance(target, (ast.Tuple, ast.List)) or not isinstance(target.ctx, ast.Store):
        return None
    return None if any(isinstance(each, ast.Starred) for each in target.elts) else len(target.elts)


def only_takes_items(frame: FrameType, function: str | None) -> bool:
    """Say whether all that `frame` does with the sequence that it is about to get is to take items of it.

    `value[i]`, `a, b = value` and `for a in value`, at once or through a local variable that is used for nothing else.
    Such code behaves the same whatever the class of the sequence is. Without source: no.

    Args:
        frame: is at a call of a function, or at a subscript.
        function: the name of the function. At `list(map(torch.chunk, ...))` another one gets the result.
    """
    node = node_at(frame)
    if name_called(node) != function or not isinstance(node, (ast.Call, ast.Subscript)):
        return False
    parent = parent_of(node, frame)
    if parent is None:
        return False
    if _takes_items(node, parent):
        return True
    if not isinstance(parent, ast.Assign) or parent.value is not node or len(parent.targets) != 1:
        return False
    loads = loads_of_local(parent.targets[0], frame)
    return loads is not None and all(_takes_items(*each) for each in loads)


def _takes_items(node: ast.AST, parent: ast.AST) -> bool:
    if isinstance(parent, ast.Subscript):
        return parent.value is node and isinstance(parent.ctx, ast.Load)
    if isinstance(parent, ast.Assign):
        return parent.value is node and all(_names_in(target) is not None for target in parent.targets)
    return isinstance(parent, (ast.For, ast.comprehension)) and parent.iter is node


def is_assertion(frame: FrameType) -> bool:
    """Say whether `frame` asks for a truth value because of `assert value`. Without source: no, it may be a branch."""
    node = node_at(frame)
    if isinstance(node, ast.Assert):  # Python 3.11 asks at the statement, of a part of the condition too
        is_of_parts = isinstance(node.test, (ast.BoolOp, ast.IfExp))
        return not is_of_parts and not (isinstance(node.test, ast.UnaryOp) and isinstance(node.test.op, ast.Not))
    parent = None if node is None else parent_of(node, frame)
    return isinstance(parent, ast.Assert) and parent.test is node


def is_type_question(frame: FrameType) -> bool:
    """Say whether model code at `frame` asks for the type of a value, and branches on the answer.

    That is a call of the builtin `isinstance`; `torch.is_tensor`, `case torch.Tensor():` and functools.singledispatch
    ask the same. Without source: wherever the code has the name `isinstance` in it at all.
    """
    code = frame.f_code
    if code is _PARAMETER_CHECK and frame.f_back is not None:
        return is_type_question(frame.f_back)
    if code is torch.is_tensor.__code__ or (code.co_filename == functools.__file__ and "dispatch" in code.co_freevars):
        return True
    if is_library_code(code):
        return False
    if source_of(code, frame.f_globals) is None:
        return "isinstance" in code.co_names
    node = node_at(frame)
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "isinstance"
    return isinstance(node, ast.MatchClass)


def written_operator(frame: FrameType) -> str | None:
    """Return the binary operator that `frame` is at (`"+"`, `"+="`), or None where it is at something else."""
    node = node_at(frame)
    if isinstance(node, ast.BinOp):
        return _BINARY[type(node.op)]
    return f"{_BINARY[type(node.op)]}=" if isinstance(node, ast.AugAssign) else None


def written_sign(frame: FrameType) -> str | None:
    """Return the sign that `frame` puts before a value, `-x` or `+x`, or None where it is at something else."""
    node = node_at(frame)
    return _SIGNS.get(type(node.op)) if isinstance(node, ast.UnaryOp) else None


def is_comparison(frame: FrameType) -> bool:
    """Say whether `frame` is at a comparison that the model writes out, `a == b`, and not at a call that makes one."""
    node = node_at(frame)
    return isinstance(node, ast.Compare) and all(isinstance(each, _COMPARISONS) for each in node.ops)


class Unpacking(NamedTuple):
    """A value is unpacked into so many names."""

    names: int


class AttributeRead(NamedTuple):
    """An attribute of a value is read."""

    name: str


class Comparing(NamedTuple):
    """A value is compared."""


# What code does with a value; a number or slice is an item that it takes.
Step = int | slice | Unpacking | AttributeRead | Comparing


def what_follows(frame: FrameType) -> list[Step]:
    """Return what `frame` does next with the value that it is about to get, as far as its code says so plainly.

    What is read of an item does not count, but for `numel` of a slice of sizes. Only names of nodes depend on it.
    """
    found: list[Step] = []
    node = node_at(frame)
    while node is not None:
        parent = parent_of(node, frame)
        if isinstance(parent, ast.Subscript) and parent.value is node:
            key = _constant(parent.slice)
            if not isinstance(key, (int, slice)):
                break
            found.append(key)
        elif isinstance(parent, ast.Attribute):
            if not found or parent.attr == "numel":
                found.append(AttributeRead(parent.attr))
            break
        elif isinstance(parent, ast.Assign) and parent.value is node:
            count = _names_in(parent.targets[0])
            return found if count is None else [*found, Unpacking(count)]
        elif isinstance(parent, ast.Compare):
            return [*found, Comparing()]
        else:
            break
        node = parent
    return found


def _constant(node: ast.expr) -> Any:
    if isinstance(node, ast.Slice):
        bounds = [None if bound is None else _constant(bound) for bound in (node.lower, node.upper, node.step)]
        is_plain = all(bound is None or isinstance(bound, int) for bound in bounds)
        return slice(*bounds) if is_plain else None
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None


def writes_a_message(frame: FrameType) -> bool:
    """Say whether the text that `frame` makes goes into a call whose result is not used, or into an error.

    `torch._assert(ok, f"{n}")`, `print(n)`, `logger.info(...)`, `raise ValueError(f"{n}")`: and not `heads[str(n)]`.
    Without source: no, the model may depend on the text.
    """
    node = node_at(frame)
    if isinstance(node, ast.Call) and _is_at_its_end(node, frame):
        return True  # `print(n)` makes the text itself
    while node is not None:
        parent = parent_of(node, frame)
        if isinstance(parent, ast.keyword):
            parent = parent_of(parent, frame)
        if isinstance(parent, ast.Call) and node is not parent.func:
            return _is_at_its_end(parent, frame)
        if isinstance(parent, ast.Assert):
            return parent.msg is node
        if not isinstance(parent, _PARTS_OF_A_TEXT):
            return False
        node = parent
    return False


def _is_at_its_end(call: ast.Call, frame: FrameType) -> bool:
    return isinstance(parent_of(call, frame), (ast.Expr, ast.Raise))


def asks_for_attribute(frame: FrameType) -> bool:
    """Say whether `frame` calls the builtin `hasattr`, or `getattr` with a default. Without source: no."""
    if not {"hasattr", "getattr"}.intersection(frame.f_code.co_names):
        return False
    node = node_at(frame)
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        return False
    return node.func.id == "hasattr" or (node.func.id == "getattr" and len(node.args) == 3)


def is_in_try(frame: FrameType) -> bool:
    """Say whether `frame` is at code of a `try` with an `except` that goes on, or of `contextlib.suppress`.

    But for `except TypeError` and the like: with other inputs of the same types the code does the same there.
    Without source: whether the function has a `try` or `with` at all.
    """
    code = frame.f_code
    if not code.co_exceptiontable:
        return False
    if source_of(code, frame.f_globals) is None:
        return True
    node = node_at(frame)
    if node is None:
        return True
    while True:
        parent = parent_of(node, frame)
        if parent is None or isinstance(parent, _SCOPES):
            return False
        if isinstance(parent, _TRIES) and _catches(parent, node):
            return True
        if isinstance(parent, (ast.With, ast.AsyncWith)) and node in parent.body and _suppresses(parent):
            return True
        node = parent


def _catches(statement: Any, node: ast.AST) -> bool:
    return node in statement.body and not all(
        _only_raises(handler) or _catches_errors_of_types(handler) for handler in statement.handlers
    )


def _catches_errors_of_types(handler: ast.ExceptHandler) -> bool:
    caught = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return all(isinstance(each, ast.Name) and each.id in _ERRORS_OF_TYPES for each in caught)


def _only_raises(handler: ast.ExceptHandler) -> bool:
    return isinstance(handler.body[-1], ast.Raise) and not any(
        isinstance(node, (ast.Return, ast.Continue, ast.Break)) for each in handler.body for node in ast.walk(each)
    )


def _suppresses(statement: ast.With | ast.AsyncWith) -> bool:
    # contextlib.suppress catches, other contexts hardly ever do.
    nodes = (node for item in statement.items for node in ast.walk(item.context_expr))
    return any("suppress" in (getattr(node, "attr", ""), getattr(node, "id", "")) for node in nodes)
