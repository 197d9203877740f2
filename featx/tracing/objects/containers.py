"""Find the lists, dicts, sets and plain objects in which a model may keep something from one call to the next."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, cast

import torch
from torch import nn

_CONTAINERS = (list, dict, set)
_LEAVES = frozenset({bool, int, float, complex, str, bytes, type(None), torch.Tensor, nn.Parameter, FunctionType})
# What has attributes and is no place for a cache, or is looked after elsewhere.
_OTHERS = (nn.Module, torch.Tensor, type, ModuleType, FunctionType, BuiltinFunctionType, MethodType)
_LIBRARIES = sys.stdlib_module_names | {"torch", "featx"}
_DEPTH = 3
# How deep in the attributes of a module, where a look costs less.
DEPTH_IN_MODULES = 8
# What is larger is a registry or a vocabulary, whose items are looked at, and not what is inside those.
LARGE = 32


def containers_in(values: Iterable[Any], depth: int = _DEPTH) -> Iterator[Any]:
    """Yield the lists, dicts and sets among `values` and, `depth` levels deep, inside them, each once.

    The attributes of an object that is neither a module nor one of torch's count as a dict. O(items).
    """
    seen: set[int] = set()
    level = list(values)
    for _ in range(depth):
        below: list[Any] = []
        for value in level:
            container = None if type(value) in _LEAVES else _container(value)
            if container is not None and id(container) not in seen:
                seen.add(id(container))
                yield container
                if len(container) <= LARGE:
                    below += dict.values(cast(Any, container)) if isinstance(container, dict) else container
            elif type(value) is tuple:
                below += value
        level = below


def copy_of(container: Any) -> Any:
    """Return a plain copy of a list, dict or set; methods that its class overrides are not called."""
    if isinstance(container, dict):
        return dict.copy(cast(dict[Any, Any], container))
    return list(cast(list[Any], container)) if isinstance(container, list) else set(container)


def _container(value: Any) -> Any:
    if isinstance(value, _CONTAINERS):
        return value
    kind = type(value)
    if isinstance(value, _OTHERS) or (kind is not SimpleNamespace and kind.__module__.partition(".")[0] in _LIBRARIES):
        return None
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except AttributeError:  # a class with slots
        return None
    return attributes if type(attributes) is dict else None
