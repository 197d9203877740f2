"""Turn the switches of the gradient mode in a model's code into nodes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

import torch

from featx.ir.arguments import Argument
from featx.ir.node import Node

_CONTEXTS = torch.autograd.grad_mode.__file__


class GradModes:
    """Records `torch.no_grad()` and the like of one trace.

    Where the model puts the mode back that it found, the graph puts back what its caller has then.
    """

    def __init__(self, create_node: Callable[..., Node]) -> None:
        self._create_node = create_node
        # What the mode is, as far as the trace has seen.
        self.is_enabled = torch.is_grad_enabled()
        self._of_caller: Node | None = None
        self._outer: list[bool] = []

    def record(self, mode: bool) -> None:
        """Note that the model is about to switch the gradient mode to `mode`."""
        callers = _context_methods()
        if callers[:1] == ["set_grad_enabled.__enter__"]:
            return  # it has set the mode when it was made
        if self._of_caller is None or self._of_caller.is_erased:
            self._of_caller = self._create_node("call_function", torch.is_grad_enabled, (), {})
        value: Argument = mode
        if any(name.endswith(("__exit__", "__call__")) for name in callers) and self._outer:
            self._outer.pop()
            if not self._outer:
                value = self._of_caller
        else:
            self._outer.append(torch.is_grad_enabled())
        self._create_node("call_function", torch._C._set_grad_enabled, (value,), {})


def _context_methods() -> list[str]:
    """Return which methods of torch's context managers for gradients run, the innermost first."""
    names: list[str] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == _CONTEXTS:
            names.append(f"{type(frame.f_locals.get('self')).__name__}.{frame.f_code.co_name}")
        elif names:
            break
        frame = frame.f_back
    return names
