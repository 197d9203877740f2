"""Take objects apart, and build them again without their constructors, which may compute something else."""

from __future__ import annotations

import functools
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

NO_VALUE = object()
_BUILT_IN = frozenset({tuple, list, dict, OrderedDict, deque})
_NONE: Mapping[str, Any] = types.MappingProxyType({})


def attributes_of(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, in its `__dict__` and in slots, by name."""
    found: dict[str, Any] = dict(getattr(value, "__dict__", {}))
    for slot in slots_of(type(value)):
        item = getattr(value, slot.__name__, NO_VALUE)
        if item is not NO_VALUE:
            found[slot.__name__] = item
    return found


def attributes_beside_items(container: Any) -> dict[str, Any]:
    """Return what a tuple, list, dict or deque of a class of its own has besides its items, by name.

    These are its attributes and the factory of a `defaultdict`. An attribute that is the item of that name is left out:
    outputs of transformers have their items as attributes too, and so has a dict that is its own `__dict__`.
    """
    if type(container) in _BUILT_IN:
        return {}
    attributes = attributes_of(container)
    if isinstance(container, defaultdict):
        attributes["default_factory"] = container.default_factory
    if not isinstance(container, dict):
        return attributes
    return {name: held for name, held in attributes.items() if dict.get(container, name, NO_VALUE) is not held}


@functools.cache
def slots_of(kind: type) -> tuple[Any, ...]:  # a mapping of classes, which do not change
    """Return the descriptors of the slots of a class and its bases: `__slots__`, not the fields of classes in C."""
    bases = [base for base in kind.__mro__ if "__slots__" in vars(base)]
    members = (member for base in bases for name, member in vars(base).items() if name != "__dict__")
    return tuple([member for member in members if isinstance(member, types.MemberDescriptorType)])


def contents_of_cell(cell: types.CellType, default: Any = NO_VALUE) -> Any:
    """Return the value of a variable of a closure, or `default` where it has none yet."""
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return default


def rebuild_object(kind: Any, attributes: Mapping[str, Any]) -> Any:
    """Return an object of a class with these attributes. No constructor and no `__post_init__` runs."""
    if issubclass(kind, types.SimpleNamespace):  # which is made in C
        made = kind.__new__(kind)
        made.__dict__.update(attributes)
        return made
    return set_attributes(object.__new__(kind), attributes)


def rebuild_tuple(kind: Any, items: Sequence[Any], attributes: Mapping[str, Any] = _NONE) -> Any:
    """Return a tuple of a class with these items and attributes. No `__new__` of the class runs."""
    return set_attributes(tuple.__new__(kind, items), attributes)


def rebuild_list(kind: Any, items: Iterable[Any], attributes: Mapping[str, Any]) -> Any:
    """Return a list of a class with these items and attributes. No constructor runs, nor an `append` of the class."""
    made = kind.__new__(kind)
    list.extend(made, items)
    return set_attributes(made, attributes)


def with_items(value: Any, items: Iterable[Any]) -> Any:
    """Return a tuple or list of the class of `value` with other items; a named tuple without its `__new__`."""
    kind: Any = type(value)
    return tuple.__new__(kind, items) if hasattr(kind, "_fields") else kind(items)


def rebuild_dict(kind: Any, items: Mapping[Any, Any], attributes: Mapping[str, Any] | None = _NONE) -> Any:
    """Return a dict of a class with these items and attributes. No constructor runs, nor a `__setitem__` of the class.

    Without attributes (None) its items are its attributes, as where a constructor does `self.__dict__ = self`.
    """
    made = kind.__new__(kind)
    set_item = OrderedDict.__setitem__ if issubclass(kind, OrderedDict) else dict.__setitem__
    for key, item in items.items():
        set_item(made, key, item)
    if attributes is None:
        made.__dict__ = made
        return made
    return set_attributes(made, attributes)


def set_attributes(made: Any, attributes: Mapping[str, Any]) -> Any:
    """Give attributes to an object, and return it. No `__setattr__` of its class runs."""
    for name, value in attributes.items():
        object.__setattr__(made, name, value)
    return made
