"""What code asks of values anywhere in it, whether that line runs or not: kinds, identities, keys.

Questions are asked of code objects, and include code that is defined inside of them.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator
from types import CodeType
from typing import Any

from featx.ir.form import FORM_ATTRIBUTES
from featx.tracing.source.frames import is_library_code
from featx.tracing.source.location import Position, Source, codes_in, names_in, source_of
from featx.tracing.source_uses.lookups import looked_up

# Classes of values that are no tensors. (`filter` and `input` are also names of tensors in models.)
_CLASSES = frozenset("bool int float complex str tuple list dict set".split())
_ASKED_OF_DEVICES = frozenset({"type", "index"})
# `isinstance(x, torch.LongTensor)` asks for a dtype and a device.
_TYPES_OF_TENSORS = frozenset(
    f"{kind}Tensor" for kind in "Float Double Half BFloat16 Byte Char Short Int Long Bool".split()
)


@functools.lru_cache(maxsize=4096)
def asks_for_kind_of_variable(code: CodeType) -> bool:
    """Say whether `code`, or code inside it, asks for the kind of a local variable, in a way that no proxy notices.

    `type(x)`, `callable(x)` and `hasattr(x, "keys")` of a local variable, and patterns of `match` that stand for
    sequences and mappings.
    Without source: no.
    """
    source = source_of(code)
    return source is not None and any(
        _asks_for_kind(node, each) for each in codes_in(code) for node in _nodes_of([each], source)
    )


def _asks_for_kind(node: ast.AST | None, code: CodeType) -> bool:
    if isinstance(node, (ast.MatchSequence, ast.MatchMapping)):
        return True
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or not node.args:
        return False
    asked, *others = node.args
    is_local = isinstance(asked, ast.Name) and asked.id in code.co_varnames and asked.id not in ("self", "cls")
    if node.func.id == "hasattr":  # which a proxy has
        return is_local and len(others) == 1 and isinstance(others[0], ast.Constant) and others[0].value == "keys"
    return is_local and not others and node.func.id in ("type", "callable")


@functools.lru_cache(maxsize=4096)
def compares_objects(code: CodeType) -> bool:
    """Say whether `code`, or code inside it, has an `a is b` of two variables anywhere, or asks for an `id`.

    Without source: yes.
    """
    source = source_of(code)
    return source is None or any(map(_compares_objects, _nodes_of(codes_in(code), source)))


@functools.lru_cache(maxsize=4096)
def asks_for_key(code: CodeType, keys: frozenset[Any]) -> bool:
    """Say whether `code` asks whether a dict has one of these keys: `key in d`, `d.get(key)`. Without source: yes."""
    source = source_of(code)
    return source is None or any(_asks_for_key(node, keys) for node in _nodes_of(codes_in(code), source))


def _asks_for_key(node: ast.AST | None, keys: frozenset[Any]) -> bool:
    found = None if isinstance(node, ast.Subscript) else looked_up(node)
    return found is not None and isinstance(found[1], ast.Constant) and found[1].value in keys


def _nodes_of(codes: Iterable[CodeType], source: Source) -> Iterator[ast.AST | None]:
    places = {Position(*place) for each in codes for place in each.co_positions()}
    return map(source.node_at, places)


def _compares_objects(node: ast.AST | None) -> bool:
    if isinstance(node, ast.Name):
        return node.id == "id"
    if not isinstance(node, ast.Compare):
        return False
    sides = zip([node.left, *node.comparators[:-1]], node.ops, node.comparators, strict=True)
    return any(
        isinstance(operator, (ast.Is, ast.IsNot)) and not _is_no_tensor(left) and not _is_no_tensor(right)
        for left, operator, right in sides
    )


def _is_no_tensor(node: ast.expr) -> bool:
    """Say whether an expression is a constant, a class such as `int` or `type(x)`, or a dtype: `x.dtype`."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "type"
    if isinstance(node, ast.Attribute):
        return node.attr in FORM_ATTRIBUTES or node.attr == "__class__"
    return isinstance(node, ast.Constant) or (isinstance(node, ast.Name) and node.id in _CLASSES)


@functools.lru_cache(maxsize=4096)
def asks_for_kind_of_device(code: CodeType) -> bool:
    """Say whether `code`, or code inside it, asks of which kind a device is.

    That is `device.type`, `device == "cpu"` or `"cuda" in str(device)`. A device is what has "device" in its name, or
    the name `dev`: `x.device`, `input_device`. Code of torch does not count. Without source: wherever it reads an
    attribute `type` at all.
    """
    if is_library_code(code):
        return False
    names = {name for each in codes_in(code) for name in (*each.co_names, *each.co_varnames)}
    if not any(map(_is_name_of_device, names)):
        return False
    source = source_of(code)
    syntax = None if source is None else source.syntax_of(code)
    if source is None or syntax is None:
        return "type" in names
    return any(_asks_for_device(node, source.parents.get(node)) for node in ast.walk(syntax))


def asks_for_type_of_tensor(code: CodeType) -> bool:
    """Say whether `code`, or code inside it, may ask for the dtype of a tensor by `isinstance(x, torch.LongTensor)`."""
    names = names_in(code)
    return "isinstance" in names and not names.isdisjoint(_TYPES_OF_TENSORS) and not is_library_code(code)


def _asks_for_device(node: ast.AST, parent: ast.AST | None) -> bool:
    if isinstance(node, ast.Attribute):
        is_method = isinstance(parent, ast.Call) and parent.func is node
        return node.attr in _ASKED_OF_DEVICES and not is_method and _is_device(node.value)
    if isinstance(node, ast.Compare):  # with a text, or a kind; two tensors move together
        are_devices = [_is_device(side) for side in (node.left, *node.comparators)]
        return any(are_devices) and not all(are_devices)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "str":
        # `"cuda" in str(x.device)`. As the key of a cache the text decides nothing.
        return any(map(_is_device, node.args)) and isinstance(parent, (ast.Compare, ast.Attribute))
    return False


def _is_device(node: ast.expr) -> bool:
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return _is_name_of_device(name)


def _is_name_of_device(name: str) -> bool:
    return "device" in name or name == "dev"
