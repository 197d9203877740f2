"""Find out to which modules around it the code of a module has a way, such as `self.owner = weakref.ref(parent)`."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Collection
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

_ATOMS = frozenset(
    {bool, int, float, complex, str, bytes, type(None), CodeType, ModuleType, torch.Tensor, nn.Parameter}
)
_NOT_FOLLOWED = (type, ModuleType, torch.Tensor, CodeType)


def referred_to(values: Collection[Any], candidates: Collection[nn.Module]) -> set[nn.Module]:
    """Return those of `candidates` to which some values lead: modules by their attributes and by those inside them.

    Follows containers, objects, closures, bound methods and weak references, and no globals. O(objects inside).
    """
    wanted = {id(candidate): candidate for candidate in candidates}
    found: set[nn.Module] = set()
    seen: set[int] = set()
    pending: list[Any] = list(values)
    while pending:
        value = pending.pop()
        if type(value) in _ATOMS or id(value) in seen:
            continue
        seen.add(id(value))
        if id(value) in wanted and not any(value is each for each in values):
            found.add(wanted[id(value)])
            if len(found) == len(wanted):
                break
            continue
        pending += _referents(value)
    return found


def _referents(value: Any) -> list[Any]:
    kind = type(value)
    if kind is weakref.ref:
        return [value()]
    if kind in weakref.ProxyTypes:
        return [proxied(value)]
    if isinstance(value, nn.Module):  # without what a trace lays over it
        return [each for name, each in value.__dict__.items() if name != "_call_impl"]
    if kind is FunctionType:
        return [value.__closure__, value.__defaults__, value.__kwdefaults__, value.__dict__]
    if isinstance(value, _NOT_FOLLOWED) or (kind is BuiltinFunctionType and isinstance(value.__self__, ModuleType)):
        return []
    return gc.get_referents(value)


def proxied(proxy: Any) -> Any:
    """Return the object that a `weakref.proxy` stands for; None if it is gone."""
    try:
        return proxy.__repr__.__self__
    except ReferenceError:
        return None
