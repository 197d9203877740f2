"""Objects of the classes of a model whose `__del__` does nothing: what a copy shares with the original stays there."""

from __future__ import annotations

import functools
from typing import Any


class _Unfinalized:
    """Takes the place of `__del__`, and of what a class does when a subclass is made."""

    __slots__ = ()

    def __del__(self) -> None:
        pass

    def __init_subclass__(cls) -> None:
        pass


def bare_copy_of(value: Any) -> Any:
    """Return an object of the class of `value`, without attributes.

    Where that class has a `__del__`, it is one of a subclass of the same name. `__del__` of the model's class gives
    back what the object holds, such as hooks and files, which are those of the model.
    """
    kind = type(value)
    return object.__new__(_subclass_of(kind) if hasattr(kind, "__del__") else kind)


@functools.lru_cache(maxsize=4096)  # one for all copies: facts of classes are remembered
def _subclass_of(kind: type) -> type:
    members = {
        "__slots__": (), "__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__,
    }  # fmt: skip
    # Past what a metaclass does for a new class, such as putting it into a register.
    return type.__new__(type(kind), kind.__name__, (_Unfinalized, kind), members)
