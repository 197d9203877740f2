"""Find lists, deques, dicts, sets and plain objects in which a model may keep something from one call to the next."""

from __future__ import annotations

import queue
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from operator import is_
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, cast
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import nn

from featx.rebuilding import NO_VALUE, slots_of
from featx.tracing.objects.plain_objects import is_plain_object

_CONTAINERS = (list, deque, dict, set)
_IN_ORDER = (list, deque)
# OrderedDict first: the methods of dict would leave its order as it is.
_BUILT_IN: tuple[Any, ...] = (OrderedDict, dict, list, deque, set)
_LEAVES = frozenset({bool, int, float, complex, str, bytes, type(None), torch.Tensor, nn.Parameter, FunctionType})
# What has attributes and is no place for a cache, or is looked after elsewhere.
_OTHERS = (nn.Module, torch.Tensor, type, ModuleType, FunctionType, BuiltinFunctionType, MethodType)
_LIBRARIES = sys.stdlib_module_names | {"torch", "featx"}
_DEPTH = 3
# How deep in the attributes of a module, where a look costs less.
DEPTH_IN_MODULES = 8
# What is larger is a registry or a vocabulary, whose items are looked at, and not what is inside those.
LARGE = 32


class SlotAttributes(MutableMapping[str, Any]):
    """The attributes of an object, `owner`, whose class has slots and no `__dict__`, as a dict of them."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner
        self._slots = {slot.__name__: slot for slot in slots_of(type(owner))}

    def __getitem__(self, name: str) -> Any:
        value = getattr(self.owner, name, NO_VALUE)
        if value is NO_VALUE:
            raise KeyError(name)
        return value

    def __setitem__(self, name: str, value: Any) -> None:
        self._slots[name].__set__(self.owner, value)

    def __delitem__(self, name: str) -> None:
        self._slots[name].__delete__(self.owner)

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._slots if hasattr(self.owner, name))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def containers_in(values: Iterable[Any], depth: int = _DEPTH, largest: int = LARGE) -> Iterator[Any]:
    """Yield the lists, deques, dicts and sets among `values` and, `depth` levels deep, inside them, each once.

    Those of more than `largest` items are not looked into. The attributes of an object that is neither a module nor one
    of torch's count as a dict; those of `threading.local` are those of this thread. O(items).
    """
    seen: set[int] = set()
    level = list(values)
    for _ in range(depth):
        below: list[Any] = []
        for value in level:
            container = None if type(value) in _LEAVES else _container(value)
            # A view of slots is made anew each time.
            identity = id(value if type(container) is SlotAttributes else container)
            if container is not None and identity not in seen:
                seen.add(identity)
                yield container
                if len(container) <= largest:
                    below += _items_of(container)
            elif type(value) is tuple:
                below += value
        level = below


def copy_of(container: Any) -> Any:
    """Return a plain copy of a list, deque, dict or set; methods that its class overrides are not called."""
    if isinstance(container, dict):
        held = cast(dict[Any, Any], container)
        # `dict.copy` of an OrderedDict calls its `__getitem__`.
        return held.copy() if type(held) is dict else dict(dict.items(held))
    if type(container) is SlotAttributes:
        return dict(container)
    return list(cast(list[Any], container)) if isinstance(container, _IN_ORDER) else set(container)


def items_by_key(container: Any) -> dict[Any, Any]:
    """Return what a list, deque, dict or set holds, by place or key; an item of a set is its own key."""
    if isinstance(container, (set, frozenset)):
        return {item: item for item in list(cast(set[Any], container))}  # at once: another thread may change it
    return dict(enumerate(list(container))) if isinstance(container, _IN_ORDER) else copy_of(container)


def has_items(container: Any, items: Any) -> bool:
    """Say whether a list, deque, dict or set holds these very items, which `copy_of` gave."""
    if len(container) != len(items):
        return False
    if isinstance(container, _IN_ORDER):
        return all(map(is_, cast(list[Any], container), items))
    if isinstance(items, dict):
        methods, values = methods_of(container), cast(dict[Any, Any], items).values()
        return all(map(is_, methods.values(container), values)) and list(methods.keys(container)) == list(items)
    return container == items


def differences(before: Mapping[Any, Any], now: Mapping[Any, Any]) -> Iterator[tuple[Any, Any, Any]]:
    """Yield key, value before and value now where these are two objects; `NO_VALUE` where there is none. O(items)."""
    for key in {**before, **now}:
        then, value = before.get(key, NO_VALUE), now.get(key, NO_VALUE)
        if value is not then:
            yield key, then, value


def refill(container: Any, items: Any) -> None:
    """Let a list, deque, dict or set hold these items again, which `copy_of` gave."""
    if has_items(container, items):
        return
    kind = methods_of(container)
    kind.clear(container)
    if isinstance(container, _IN_ORDER):
        kind.extend(container, items)
    else:
        kind.update(container, items)


def methods_of(container: Any) -> Any:
    """Return the class whose methods change a container and run no code of the model, as those of its own may.

    Outputs of transformers are dicts that refuse to be updated.
    """
    kind = type(container)
    return kind if kind in _BUILT_IN else next((each for each in _BUILT_IN if isinstance(container, each)), kind)


def _items_of(container: Any) -> Any:
    if isinstance(container, dict):
        return dict.values(cast(dict[Any, Any], container))
    return container.values() if type(container) is SlotAttributes else container


def _container(value: Any) -> Any:
    if isinstance(value, _CONTAINERS):
        return value
    kind = type(value)
    if isinstance(value, threading.local):
        return value.__dict__
    if isinstance(value, (WeakKeyDictionary, WeakValueDictionary)):
        return cast(Any, value).data
    if isinstance(value, queue.Queue):
        return cast(Any, value).queue
    if isinstance(value, _OTHERS) or (kind is not SimpleNamespace and kind.__module__.partition(".")[0] in _LIBRARIES):
        return None
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return SlotAttributes(value) if is_plain_object(value) else None
    return attributes if type(attributes) is dict else None
