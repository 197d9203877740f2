"""Copy the structure that a model is given as an input: containers and objects, down to their leaves.

A structure is a tuple, list or deque, a dict or another mapping, or an object that is nothing but its attributes (a
dataclass, a namespace, a UserDict, a transformers BatchEncoding). What a container of a class of its own has besides
its items is a part of it too. Everything else is a leaf.
"""

from __future__ import annotations

import collections
import operator
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch

from featx.rebuilding import attributes_beside_items, attributes_of, rebuild_object, set_attributes
from featx.tracing.objects.plain_objects import is_plain_object
from featx.tree import rebuild_mapping, rebuild_sequence

# How a part is read: `operator.getitem` or `getattr`, and the key or name.
Step = tuple[Callable[[Any, Any], Any], Any]
Path = tuple[Step, ...]
Leaf = Callable[[Any, Path], Any]
OnCopy = Callable[[Any, Path], None]
_CONTAINERS = (tuple, list, dict, collections.deque, types.MappingProxyType)


@dataclass(frozen=True)
class AttributeKey:
    """The key of an attribute among the contents of a container, one of whose items may have the same name."""

    name: str

    def __repr__(self) -> str:
        return f"the attribute {self.name!r}"


def copy_structure(value: Any, leaf: Leaf, on_copy: OnCopy | None = None) -> Any:
    """Return a copy of `value` with `leaf(value, path)` in the place of each leaf. O(size).

    What stands in several places is copied once, and an object may hold itself.

    Args:
        value: the structure, or a leaf.
        leaf: is called with each leaf and the way to it.
        on_copy: is called with the copy of each container or object, when it is filled, and the way to it.
    """
    return _Copying(leaf, on_copy).copy(value, ())


def text_of(path: Path) -> str:
    """Return what stands after the name of a structure in code that reads a part: `.fields['x'][0]`."""
    return "".join([f".{key}" if function is getattr else f"[{key!r}]" for function, key in path])


def leaves_of(value: Any) -> Iterator[tuple[Any, Path]]:
    """Yield each leaf of a structure, and the way to it. O(size)."""
    return ((part, path) for part, path in parts_of(value) if not is_structure(part))


def parts_of(value: Any) -> Iterator[tuple[Any, Path]]:
    """Yield `value` and all that is in it, containers and objects once each, with the way to it. O(size)."""
    return _parts_of(value, (), {})


def _parts_of(part: Any, path: Path, known: dict[int, Any]) -> Iterator[tuple[Any, Path]]:
    # No function inside the other one: it would hold itself, and keep the tensors of the trace until the next
    # collection of garbage.
    if type(part) is weakref.ref or id(part) in known:
        return
    yield part, path
    if is_structure(part):
        known[id(part)] = part
        way = operator.getitem if isinstance(part, _CONTAINERS) else getattr
        for key, item in contents_of(part).items():
            step: Step = (getattr, key.name) if isinstance(key, AttributeKey) else (way, key)
            yield from _parts_of(item, (*path, step), known)


def contents_of(container: Any) -> dict[Any, Any]:
    """Return what a container or an object of a structure holds now, by key, index or name.

    What a container has besides its items has an `AttributeKey`.
    """
    if isinstance(container, (dict, types.MappingProxyType)):
        items: dict[Any, Any] = dict(cast(Any, container))
    elif isinstance(container, (tuple, list, collections.deque)):
        items = dict(enumerate(cast(Any, container)))
    else:
        return attributes_of(container)
    items.update({AttributeKey(name): held for name, held in attributes_beside_items(container).items()})
    return items


def holds_something_else(value: Any, before: Mapping[int, dict[Any, Any]]) -> bool:
    """Say whether a structure, or something in it, holds other objects than before.

    `before` has what `contents_of` gave, by the ids of containers and objects; a value that it has not is none of them.
    """
    if id(value) not in before:
        return False
    parts = [part for part, _ in parts_of(value) if is_structure(part)]
    return any(id(part) not in before or not _is_as_before(part, before[id(part)]) for part in parts)


def _is_as_before(container: Any, before: dict[Any, Any]) -> bool:
    now = contents_of(container)
    return now.keys() == before.keys() and all(item is before[key] for key, item in now.items())


def is_structure(value: object) -> bool:
    """Say whether a value has parts that are followed."""
    if isinstance(value, _CONTAINERS):
        return not isinstance(value, torch.Size)
    return not isinstance(value, torch.Tensor) and is_plain_object(value)


class _Copying:
    def __init__(self, leaf: Leaf, on_copy: OnCopy | None) -> None:
        self._leaf = leaf
        self._on_copy = on_copy
        # By the id of the original, which must stay alive.
        self._known: dict[int, tuple[Any, Any]] = {}

    def copy(self, value: Any, path: Path) -> Any:
        if not is_structure(value) and type(value) is not weakref.ref:
            return self._leaf(value, path)
        known = self._known.get(id(value))
        if known is not None:
            return known[1]
        duplicate = self._copied(value, path)
        self._known[id(value)] = (value, duplicate)
        if self._on_copy is not None and type(value) is not weakref.ref:
            self._on_copy(duplicate, path)
        return duplicate

    def _copied(self, value: Any, path: Path) -> Any:
        if isinstance(value, _CONTAINERS):
            is_mapping = isinstance(value, (dict, types.MappingProxyType))
            duplicate = self._mapping(value, path) if is_mapping else self._sequence(value, path)
            self._known[id(value)] = (value, duplicate)
            return self._with_attributes(duplicate, attributes_beside_items(value), path)
        if type(value) is weakref.ref:
            target = self._known.get(id(value()))
            return value if target is None else weakref.ref(target[1])
        duplicate = rebuild_object(type(value), {})
        self._known[id(value)] = (value, duplicate)
        return self._with_attributes(duplicate, attributes_of(value), path)

    def _with_attributes(self, duplicate: Any, attributes: Mapping[str, Any], path: Path) -> Any:
        copies = {name: self.copy(item, (*path, (getattr, name))) for name, item in attributes.items()}
        return set_attributes(duplicate, copies)

    def _mapping(self, value: Any, path: Path) -> Any:
        items = {key: self.copy(item, (*path, (operator.getitem, key))) for key, item in value.items()}
        return items if type(value) is dict else rebuild_mapping(value, items)

    def _sequence(self, value: Any, path: Path) -> Any:
        items = [self.copy(item, (*path, (operator.getitem, index))) for index, item in enumerate(value)]
        if isinstance(value, collections.deque):
            return type(value)(items, value.maxlen)
        return rebuild_sequence(value, items)
