"""Notice reads of attributes that a module which is kept whole has assigned in its call.

`self.grid = x.shape[2:]` in a patch embedding, and `self.embed.grid[0]` in the model around it: a graph that calls the
module as one node has no node for the number, and a trace would take it for a constant.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from featx.ir.modules import modules_of

# Is called with the module and the name when other code reads such an attribute.
AttributeReadHandler = Callable[[nn.Module, str], None]


class _Buffers(dict[str, Any]):
    """A module's dict of buffers, in which `nn.Module` finds attributes that are missing in its `__dict__`."""

    __slots__ = ("left", "on_read", "owner")

    left: dict[str, Any]
    on_read: AttributeReadHandler
    owner: nn.Module

    def __contains__(self, name: object) -> bool:
        # `nn.Module.__setattr__` asks too, and must not take an attribute for a buffer.
        if name in self.left and sys._getframe(1).f_code is nn.Module.__getattr__.__code__:
            self.on_read(self.owner, str(name))
            return True
        return super().__contains__(name)

    def __missing__(self, name: str) -> Any:
        return self.left[name]

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self.items()),)


class LeftAttributes:
    """The attributes of the modules of a replica that calls of modules which are kept whole have left there.

    They are taken out of the `__dict__` of their module until it, or one around it, is called again, so that
    `nn.Module.__getattr__` is asked for them.

    Args:
        on_read: is called when an attribute is read meanwhile; the value is returned if it does not raise.
    """

    def __init__(self, on_read: AttributeReadHandler) -> None:
        self._on_read = on_read
        self._hidden: dict[nn.Module, _Buffers] = {}

    def hide(self, module: nn.Module, names: Iterable[str]) -> list[str]:
        """Hide attributes of a module; return those that cannot be hidden, as its class has them too."""
        state, kind = module.__dict__, type(module)
        present = [name for name in names if name in state]
        visible = [name for name in present if hasattr(kind, name)]
        is_observable = type(state.get("_buffers")) is dict and kind.__getattribute__ is object.__getattribute__
        left = {name: state.pop(name) for name in present if name not in visible} if is_observable else {}
        if left:
            buffers = self._hidden[module] = _Buffers(state["_buffers"])
            buffers.left, buffers.on_read, buffers.owner = left, self._on_read, module
            state["_buffers"] = buffers
        return visible if is_observable else present

    def reveal(self, module: nn.Module | None = None) -> None:
        """Put the attributes of a module and of those inside it back, or all; not those that were assigned again."""
        if not self._hidden:
            return
        for inner in list(self._hidden) if module is None else modules_of(module):
            buffers = self._hidden.pop(inner, None)
            if buffers is not None:
                inner.__dict__["_buffers"] = dict(buffers)
                for name, value in buffers.left.items():
                    inner.__dict__.setdefault(name, value)
