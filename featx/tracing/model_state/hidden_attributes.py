"""Take attributes away from modules of a replica for a run, also those that their class has too."""

from __future__ import annotations

from collections.abc import Callable
from types import BuiltinMethodType
from typing import Any

from torch import nn


class _Hidden:
    """An attribute of a class that a module seems not to have until it is assigned."""

    def __init__(self, name: str, on_read: Callable[[], None]) -> None:
        self._name = name
        self._on_read = on_read

    def __get__(self, module: nn.Module | None, kind: type) -> Any:
        if module is not None and self._name in module.__dict__:
            return module.__dict__[self._name]
        self._on_read()
        raise AttributeError(self._name)

    def __set__(self, module: nn.Module, value: Any) -> None:
        module.__dict__[self._name] = value

    def __delete__(self, module: nn.Module) -> None:
        del module.__dict__[self._name]


def hide(module: nn.Module, name: str, on_read: Callable[[], None]) -> None:
    """Take an attribute away from a module of a replica.

    Where its class has it too, the module gets a class of its own, which calls `on_read` and raises AttributeError when
    the attribute is read before it is assigned. A class that notices its subclasses gets none: `on_read` is called at
    once. Where the class does not have it, `nn.Module` raises that error.
    """
    module.__dict__.pop(name, None)
    kind = type(module)
    if not hasattr(kind, name):
        return
    if type(kind) is not type or not isinstance(kind.__init_subclass__, BuiltinMethodType):
        on_read()
        return
    members = {name: _Hidden(name, on_read), "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    module.__class__ = type(kind.__name__, (kind,), members)
