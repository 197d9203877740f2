"""Give the hooks of a replica globals of their own, so that what they store in a trace is gone with it."""

from __future__ import annotations

import functools
from collections.abc import Collection
from types import FunctionType, MethodType, ModuleType
from typing import Any

from featx.tracing.replica.object_copies import ObjectCopies, is_of_library
from featx.tracing.source.location import names_in


class HookGlobals:
    """Copies hooks that name data of their Python module, such as a dict of features.

    Args:
        copies: copies that data.
        shared: the ids of the globals that the code of the model uses too. What hooks store there forward may read, and
            a trace looks after it.
    """

    def __init__(self, copies: ObjectCopies, shared: Collection[int]) -> None:
        self._copies = copies
        self._shared = shared
        # By the id of globals, those of the copies; and the copies of functions, by the id of the original.
        self._globals: dict[int, dict[str, Any]] = {}
        self._functions: dict[int, FunctionType] = {}

    def of(self, hook: Any) -> Any:
        """Return a hook that does what `hook` does, on copies of the data that its code names. O(size of the data)."""
        if isinstance(hook, functools.partial):
            return type(hook)(self.of(hook.func), *hook.args, **hook.keywords)
        if isinstance(hook, MethodType):
            function = self.of(hook.__func__)
            return hook if function is hook.__func__ else MethodType(function, hook.__self__)
        if not isinstance(hook, FunctionType) or id(hook.__globals__) in self._shared or is_of_library(hook):
            return hook
        return self._function(hook)

    def drop(self) -> None:
        """Empty the globals, which hold functions that hold them, so that all is freed at once."""
        for own in self._globals.values():
            own.clear()
        self._functions.clear()

    def _function(self, function: FunctionType) -> FunctionType:
        known = self._functions.get(id(function))
        if known is not None:
            return known
        namespace = function.__globals__
        named = {name: namespace[name] for name in names_in(function.__code__) if name in namespace}
        data = {name: value for name, value in named.items() if not isinstance(value, (ModuleType, type))}
        if not data:
            return function
        own = self._globals.setdefault(id(namespace), dict(namespace))
        twin = FunctionType(function.__code__, own, function.__name__, function.__defaults__, function.__closure__)
        twin.__kwdefaults__ = function.__kwdefaults__
        twin.__dict__.update(function.__dict__)
        self._functions[id(function)] = twin
        for name, value in data.items():
            is_beside = isinstance(value, FunctionType) and value.__globals__ is namespace
            own[name] = self._function(value) if is_beside else self._copies.of(value)
        return twin
