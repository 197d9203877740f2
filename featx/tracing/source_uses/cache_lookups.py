"""Which caches a line of the model looks up a key in: a dict, or a cached method.

A number that is a part of such a key decides nothing but whether this call has put something there before.
"""

from __future__ import annotations

import ast
import functools
import inspect
from collections import OrderedDict, defaultdict
from types import FrameType
from typing import Any

from torch import nn

from featx.rebuilding import NO_VALUE
from featx.tracing.source.location import loads_of_local, node_at, parent_of
from featx.tracing.source_uses.lookups import looked_up

_DICTS = (dict, OrderedDict, defaultdict)
# What a text passes through until it is whole: `f"{n}" + "x"`, `str(n)`, `"_".join([str(n), str(m)])`.
_PARTS_OF_A_TEXT = (ast.JoinedStr, ast.FormattedValue, ast.BinOp, ast.Tuple, ast.List, ast.Call)


def key_looked_up(frame: FrameType) -> Any:
    """Return the key that `frame` looks up, where it is a variable, an attribute or a tuple of these; else a marker."""
    found = looked_up(node_at(frame))
    if found is None:
        return NO_VALUE
    if not isinstance(found[1], ast.Tuple):
        return _value_of(found[1], frame)
    items = tuple(each.value if isinstance(each, ast.Constant) else _value_of(each, frame) for each in found[1].elts)
    return NO_VALUE if any(item is NO_VALUE for item in items) else items


def is_tuple_key(frame: FrameType) -> bool:
    """Say whether the key by which `frame` looks something up is a tuple for sure."""
    found = looked_up(node_at(frame))
    return found is not None and (isinstance(found[1], ast.Tuple) or isinstance(_value_of(found[1], frame), tuple))


def dicts_looked_up(frame: FrameType) -> list[dict[Any, Any]]:
    """Return the dict in which `frame` looks up the key that it is about to hash: `key in d`, `d[key]`, `d.get(key)`.

    An empty list where it does something else, and without source.
    """
    found = looked_up(node_at(frame))
    held = None if found is None else _dict_at(found[0], frame)
    return [] if held is None else [held]


def dicts_looked_up_by_text(frame: FrameType) -> list[dict[Any, Any]]:
    """Return the dicts in which the text that `frame` makes is looked up: `d[f"{h}x{w}"]`, or through a local variable.

    An empty list where something else is done with the text, and without source.
    """
    node = node_at(frame)
    parent = None if node is None else parent_of(node, frame)
    while node is not None and isinstance(parent, _PARTS_OF_A_TEXT) and _dict_of_key(node, parent, frame) is None:
        if isinstance(parent, ast.Call) and not _makes_text(parent):
            return []
        node, parent = parent, parent_of(parent, frame)
    if node is None or parent is None:
        return []
    if isinstance(parent, ast.Assign) and parent.value is node and len(parent.targets) == 1:
        uses = loads_of_local(parent.targets[0], frame)
    else:
        uses = [(node, parent)]
    found = [_dict_of_key(use, around, frame) for use, around in uses or ()]
    return [] if None in found else [each for each in found if each is not None]


def calls_cached_method(frame: FrameType) -> bool:
    """Say whether `frame` calls a method of a module that `functools.lru_cache` has wrapped, which keeps it by module.

    Without source: no.
    """
    node = node_at(frame)
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    owner = _value_of(node.func.value, frame)
    if not isinstance(owner, nn.Module) or type(owner).__hash__ is not nn.Module.__hash__:
        return False
    return isinstance(inspect.getattr_static(owner, node.func.attr, None), functools._lru_cache_wrapper)


def _dict_of_key(node: ast.AST, parent: ast.AST, frame: FrameType) -> dict[Any, Any] | None:
    """Return the dict that `parent` looks `node` up in, or None where `node` is something else of it."""
    found = looked_up(parent)
    return _dict_at(found[0], frame) if found is not None and found[1] is node else None


def _makes_text(call: ast.Call) -> bool:
    if isinstance(call.func, ast.Name):
        return call.func.id in ("str", "repr", "format")
    return isinstance(call.func, ast.Attribute) and call.func.attr in ("join", "format")


def _dict_at(node: ast.expr, frame: FrameType) -> dict[Any, Any] | None:
    value = _value_of(node, frame)
    return value if type(value) in _DICTS else None


def _value_of(node: ast.expr, frame: FrameType) -> Any:
    """Return the value of a variable, or of an attribute that is read without code of a class; else a marker."""
    if isinstance(node, ast.Name):
        for names in (frame.f_locals, frame.f_globals):
            if node.id in names:
                return names[node.id]
    elif isinstance(node, ast.Attribute):
        owner = _value_of(node.value, frame)
        if owner is not NO_VALUE:
            members = getattr(owner, "_modules", None) if isinstance(owner, nn.Module) else None
            if members and node.attr in members:
                return members[node.attr]
            return inspect.getattr_static(owner, node.attr, NO_VALUE)
    return NO_VALUE
