"""Arguments of nodes: literals, and nodes, in tuples, lists, dicts and slices at any depth."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from featx.errors import ArgumentTypeError
from featx.ir.immutable import ImmutableDict, ImmutableList
from featx.rebuilding import with_items

if TYPE_CHECKING:
    from featx.ir.node import Node

# Any: an argument is a Node, a literal of any type, or a tuple, list, dict, slice or range of arguments.
Argument: TypeAlias = Any


class Operand:
    """What stands in an argument for a value that is computed: every `Node` is one, and nothing else."""

    __slots__ = ()


# Types of arguments that hold no node and are stored as they are, found by one lookup.
ATOMS = frozenset({int, float, bool, str, complex, type(None), type(Ellipsis), bytes})


def freeze(argument: Argument, uses: dict[Node, None]) -> Argument:
    """Return `argument` with immutable lists and dicts, and add each node in it to `uses`.

    Raises:
        ArgumentTypeError: a node stands where it would not be seen: as a key, in a set or in a dataclass.
    """
    kind = type(argument)
    if isinstance(argument, Operand):
        uses[cast("Node", argument)] = None
        return argument
    if kind in ATOMS:
        return argument
    if isinstance(argument, tuple):
        return with_items(argument, [freeze(item, uses) for item in cast(tuple[Any, ...], argument)])
    if isinstance(argument, list):
        return ImmutableList([freeze(item, uses) for item in cast(list[Any], argument)])
    if isinstance(argument, dict):
        if any(isinstance(key, Operand) for key in cast(dict[Any, Any], argument)):
            raise ArgumentTypeError(
                "an argument has a node as the key of a dict; build the dict with a call_function node"
            )
        return ImmutableDict({key: freeze(item, uses) for key, item in cast(dict[Any, Any], argument).items()})
    if kind is slice:
        return slice(freeze(argument.start, uses), freeze(argument.stop, uses), freeze(argument.step, uses))
    _refuse_hidden_nodes(argument)
    return argument


def _refuse_hidden_nodes(argument: Argument) -> None:
    hidden: Iterable[Any] = ()
    if isinstance(argument, (set, frozenset)):
        hidden = cast(set[Any], argument)
    elif dataclasses.is_dataclass(argument) and not isinstance(argument, type):
        hidden = [getattr(argument, field.name) for field in dataclasses.fields(argument)]
    if any(isinstance(item, Operand) for item in hidden):
        raise ArgumentTypeError(
            f"an argument has a node inside a {type(argument).__name__}, where it would not be seen; "
            "build the value with a call_function node"
        )


def nodes_in(value: Any) -> list[Node]:
    """Return the nodes in an argument, each once."""
    found: dict[Node, None] = {}
    collect_nodes(value, found)
    return list(found)


def collect_nodes(argument: Argument, found: dict[Node, None]) -> None:
    """Add each node in `argument` to `found`, in the order in which a reader meets them."""
    kind = type(argument)
    if isinstance(argument, Operand):
        found[cast("Node", argument)] = None
    elif kind in ATOMS:
        return
    elif isinstance(argument, (tuple, list)):
        for item in cast(tuple[Any, ...], argument):
            collect_nodes(item, found)
    elif isinstance(argument, dict):
        for item in cast(dict[Any, Any], argument).values():
            collect_nodes(item, found)
    elif kind is slice:
        for item in (argument.start, argument.stop, argument.step):
            collect_nodes(item, found)


def leaves_of(argument: Any) -> Iterator[Any]:
    """Yield what nested tuples, lists, dicts and slices hold, in order: nodes and constants."""
    if isinstance(argument, (tuple, list)):
        for item in cast(tuple[Any, ...], argument):
            yield from leaves_of(item)
    elif isinstance(argument, dict):
        for item in cast(dict[Any, Any], argument).values():
            yield from leaves_of(item)
    elif isinstance(argument, slice):
        for item in (argument.start, argument.stop, argument.step):
            yield from leaves_of(item)
    else:
        yield argument


def map_arg(a: Argument, fn: Callable[[Node], Argument]) -> Argument:
    """Return `a` with `fn` applied to each Node in it. Tuples, lists, dicts and slices keep their type."""
    if isinstance(a, Operand):
        return fn(cast("Node", a))
    if type(a) in ATOMS:
        return a
    return _map_structure(a, lambda item: map_arg(item, fn), lambda leaf: leaf)


def map_aggregate(a: Argument, fn: Callable[[Argument], Argument]) -> Argument:
    """Return `a` with `fn` applied to each leaf in it, Node or not. Tuples, lists, dicts and slices keep their type."""
    return _map_structure(a, lambda item: map_aggregate(item, fn), fn)


def _map_structure(
    a: Argument, recurse: Callable[[Argument], Argument], on_leaf: Callable[[Argument], Argument]
) -> Argument:
    if isinstance(a, tuple):
        return with_items(a, [recurse(item) for item in cast(tuple[Any, ...], a)])
    if isinstance(a, list):
        return ImmutableList([recurse(item) for item in cast(list[Any], a)])
    if isinstance(a, dict):
        return ImmutableDict({key: recurse(item) for key, item in cast(dict[Any, Any], a).items()})
    if isinstance(a, slice):
        return slice(recurse(a.start), recurse(a.stop), recurse(a.step))
    return on_leaf(a)
