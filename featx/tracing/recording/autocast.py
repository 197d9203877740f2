"""Turn the autocast regions of a model's code into nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.amp import autocast_mode

from featx.ir.node import Node

_State = tuple[tuple[str, bool, torch.dtype], ...]


class AutocastModes:
    """Compares the autocast state with that at the start of the trace, and records where it differs.

    At most one region is open at a time: on a change it is closed and, where that is not the state of the start,
    another one opened.
    """

    def __init__(self, create_node: Callable[..., Node]) -> None:
        self._create_node = create_node
        self._outside = self._present = _state()
        self._entered: list[Node] = []

    def mark(self) -> tuple[_State, list[Node]]:
        """Return what `forget` needs to undo what is recorded from now on."""
        return self._present, self._entered.copy()

    def forget(self, mark: tuple[_State, list[Node]]) -> None:
        """Go back to where `mark` was made; the nodes since then are erased by others."""
        self._present, self._entered = mark

    def follow(self) -> None:
        """Note the state ahead of a node."""
        state = _state()
        if state == self._present:
            return
        self._present = state
        self.leave()
        for (device, enabled, dtype), outside in zip(state, self._outside, strict=True):
            if (device, enabled, dtype) != outside:
                arguments: tuple[Any, ...] = (device, dtype, enabled, torch.is_autocast_cache_enabled())
                self._entered.append(self._create_node("call_function", autocast_mode._enter_autocast, arguments, {}))

    def leave(self) -> None:
        """Close what is open; also at the end of the trace."""
        while self._entered:
            self._create_node("call_function", autocast_mode._exit_autocast, (self._entered.pop(),), {})


def _state() -> _State:
    if not torch._C._is_any_autocast_enabled():
        return _OFF
    return tuple((device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in _DEVICES)


_DEVICES = ("cpu", "cuda")
_OFF: _State = tuple((device, False, torch.get_autocast_dtype(device)) for device in _DEVICES)
