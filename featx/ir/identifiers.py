"""Turn the names that a node is given into plain strings, and refuse those that Python cannot call or bind.

A `call_method` target is looked up in an object, a `placeholder` target is a parameter, a key of `kwargs` is a keyword.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from keyword import iskeyword
from typing import Any, TypeAlias, TypeVar, cast

from featx.errors import ArgumentTypeError, NodeTargetError, OpcodeError
from featx.ir.opcodes import LEGAL_OPS

Target: TypeAlias = str | Callable[..., Any]
_Any = TypeVar("_Any")

_WITH_ANY_STRING = frozenset({"call_module", "get_attr", "output"})


def is_plain(name: str) -> bool:
    """Say whether Python source can bind and read `name`, a plain string, as exactly this name. O(length).

    Python reads an identifier in source in its NFKC form, so source has no way to write one of another form. It binds
    no keyword, and not `__debug__`, which is a constant of the compiler.
    """
    return (
        name.isidentifier()
        and not iskeyword(name)
        and (name.isascii() or unicodedata.is_normalized("NFKC", name))
        and name != "__debug__"
    )


def plain_text(text: object) -> str:
    """Return `text` as a `str` and not of a subclass, which may print as something else than it holds.

    Raises:
        ArgumentTypeError: it is no string.
    """
    if type(text) is str:
        return text
    if not issubclass(type(text), str):
        raise ArgumentTypeError(f"a name must be a string, got {text!r} of type {type(text).__name__}")
    return str.__str__(cast(str, text))


def parameter_of(target: str) -> str:
    """Return the name of the parameter that a `placeholder` target declares: `args` for `*args`."""
    return plain_text(target).removeprefix("*").removeprefix("*")


def is_legal_target(op: str, target: object) -> bool:
    """Say whether a node with this opcode can have `target`, whatever modules and values there are."""
    if op == "call_function" or not isinstance(target, str):
        return op == "call_function" and callable(target) and not isinstance(target, str)
    if op == "call_method":
        return plain_text(target).isidentifier()
    return op != "placeholder" or is_plain(parameter_of(target))


def with_hash(target: _Any) -> _Any:
    """Return a callable that has no hash, such as a dataclass with `__call__`, as its method, which has one."""
    try:
        hash(target)
    except TypeError:
        return cast(Any, target).__call__  # it is told apart by its object's identity, and keeps that alive
    return target


def legal_target(op: str, target: Target) -> Target:
    """Return `target` of a node with this opcode, as a plain `str` where it is a string, and else with a hash.

    Raises:
        OpcodeError: the opcode is unknown.
        NodeTargetError: it is not callable (`call_function`), not a string (every other opcode), or not the name of a
            method or of an input.
    """
    if type(target) is str and op in _WITH_ANY_STRING:
        return target
    if op not in LEGAL_OPS:
        raise OpcodeError(f"unknown opcode {op!r}; expected one of {', '.join(sorted(LEGAL_OPS))}")
    if not is_legal_target(op, target):
        raise NodeTargetError(f"the target of a {op} node must be {expected_target(op, target)}, got {target!r}")
    return plain_text(target) if isinstance(target, str) else with_hash(target)


def expected_target(op: str, target: object) -> str:
    """Return what `target` of a node with this opcode must be and is not, for messages."""
    if op == "call_function":
        return "a callable"
    if isinstance(target, str) and op == "call_method":
        return "an identifier (read another attribute with a call_function node of getattr)"
    if isinstance(target, str) and op == "placeholder":
        return "an identifier in NFKC form and no keyword, after `*` or `**` if any"
    return "a string"


def keyword_names(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return `kwargs` with plain strings as keys; any string can be one, `f(**{"any string": 1})`.

    Raises:
        ArgumentTypeError: a key is not a string, or two keys are the same text.
    """
    for key in kwargs:
        if type(key) is not str:
            break
    else:
        return kwargs
    plain: dict[str, Any] = {}
    for key, value in kwargs.items():
        if not isinstance(cast(object, key), str):
            raise ArgumentTypeError(f"a keyword of kwargs must be a string, got {key!r} of type {type(key).__name__}")
        if plain_text(key) in plain:
            raise ArgumentTypeError(f"kwargs has the keyword {plain_text(key)!r} twice; give it once")
        plain[plain_text(key)] = value
    return plain
