"""Turn the autocast regions of a model's code into nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.amp import autocast_mode

from featx.ir.node import Node
from featx.tracing.environment.autocast_state import (
    AUTOCAST_QUERIES,
    DEVICES,
    DTYPE_QUERIES,
    AutocastState,
    autocast_state,
)

# The state, and the devices for which a region was observed to be open.
_Present = tuple[AutocastState, frozenset[str]]
# A state for which there are checks, and whether all dtypes are checked.
_Asked = tuple[AutocastState, bool]
# What is present, the regions that were entered, and what was asked.
_Mark = tuple[_Present, list[Node], set[_Asked]]


class AutocastModes:
    """Compares the autocast state with that at the start of the trace, and records where it differs.

    At most one region is open at a time: on a change it is closed and, where that is not the state of the start,
    another one opened. A region that sets what is set anyhow, as `autocast("cpu", enabled=False)` outside of autocast
    does, changes nothing; where the calls of the thread are observed, it is recorded too.

    Args:
        create_node: adds a node to the graph.
        guard: adds a check that the value of a node is again what it is now.

    Attributes:
        was_observed: whether such a region was observed, or code that asks for the state.
        has_ambiguous_dtype: whether a region casts to a dtype that may be its own, or that around the model.
    """

    def __init__(self, create_node: Callable[..., Node], guard: Callable[[Node, Any, str], Node]) -> None:
        self._create_node, self._guard = create_node, guard
        # What `_state` is where no device casts; its dtypes are those that the caller has set.
        self._off: AutocastState = tuple((device, False, torch.get_autocast_dtype(device)) for device in DEVICES)
        self._outside = self._state()
        self._present: _Present = (self._outside, frozenset())
        self._open: Counter[str] = Counter()
        self._entered: list[Node] = []
        self._asked: set[_Asked] = set()
        self.was_observed = self.has_ambiguous_dtype = False

    def _state(self) -> AutocastState:
        return autocast_state() if torch._C._is_any_autocast_enabled() else self._off

    def mark(self) -> _Mark:
        """Return what `forget` needs to undo what is recorded from now on."""
        return self._present, self._entered.copy(), self._asked.copy()

    def forget(self, mark: _Mark) -> None:
        """Go back to where `mark` was made; the nodes since then are erased by others."""
        self._present, self._entered, self._asked = mark

    def on_call(self, frame: FrameType, event: str, called: Any) -> None:
        """Hear a call of the model's code, see `ProfileCallback`."""
        if event == "call":
            code, local = frame.f_code, frame.f_locals
            if code is _ENTER:
                self._open[local["self"].device] += 1
                self.was_observed = True
            elif code is _EXIT:
                self._open[local["self"].device] -= 1
            elif code is _INIT and local["enabled"] and local["dtype"] is None:
                self.record_state(casts_by_default=True)
        elif event == "c_call" and called in AUTOCAST_QUERIES and _is_of_model(frame):
            self.record_state(casts_by_default=called in DTYPE_QUERIES)

    def record_state(self, *, casts_by_default: bool = False) -> None:
        """Record that the state must be the present one when the graph runs, since forward depends on it.

        With `casts_by_default` the dtypes count too for devices that cast nothing now.
        """
        self.was_observed = True
        asked = (autocast_state() if casts_by_default else self._state(), casts_by_default)
        if asked in self._asked:
            return
        self._asked.add(asked)
        for device, enabled, dtype in asked[0]:
            answers = [(torch.is_autocast_enabled, enabled), (torch.get_autocast_dtype, dtype)]
            for function, answer in answers if enabled or casts_by_default else answers[:1]:
                node = self._create_node("call_function", function, (device,), {})
                self._guard(node, answer, f"what torch.{function.__name__}({device!r}) answers")

    def follow(self) -> None:
        """Note the state before a node."""
        state = self._state()
        present = (state, frozenset(+self._open) if self._open else frozenset[str]())
        if present == self._present:
            return
        self._present = present
        self.leave()
        for each, outside in zip(state, self._outside, strict=True):
            device, enabled, dtype = each
            if each != outside or device in present[1]:
                self.has_ambiguous_dtype = self.has_ambiguous_dtype or (enabled and dtype is outside[2])
                arguments: tuple[Any, ...] = (device, dtype, enabled, torch.is_autocast_cache_enabled())
                self._entered.append(self._create_node("call_function", autocast_mode._enter_autocast, arguments, {}))

    def leave(self) -> None:
        """Close what is open; also at the end of the trace."""
        while self._entered:
            self._create_node("call_function", autocast_mode._exit_autocast, (self._entered.pop(),), {})


def _is_of_model(frame: FrameType) -> bool:
    return frame.f_code not in _OF_AUTOCAST and not str(frame.f_globals.get("__name__")).startswith("featx.")


_INIT, _ENTER, _EXIT = (getattr(torch.autocast, name).__code__ for name in ("__init__", "__enter__", "__exit__"))
_OF_AUTOCAST = {_INIT, _ENTER, _EXIT}
