"""Turn the switches of the gradient mode in a model's code into nodes."""

from __future__ import annotations

from collections.abc import Callable

import torch

from featx.ir.node import Argument, Node


class GradModes:
    """Records `torch.no_grad()` and the like of one trace.

    Where the model puts the mode back that it found, the graph puts back what its caller has then.
    """

    def __init__(self, create_node: Callable[..., Node]) -> None:
        self._create_node = create_node
        self._of_caller: Node | None = None
        self._outer: list[bool] = []

    def record(self, mode: bool) -> None:
        """Note that the model is about to switch the gradient mode to `mode`."""
        if mode == torch.is_grad_enabled() and not (self._outer and mode == self._outer[-1]):
            return  # `set_grad_enabled` sets it when it is made, and again when it is entered
        if self._of_caller is None:
            self._of_caller = self._create_node("call_function", torch.is_grad_enabled, (), {})
        value: Argument = mode
        if self._outer and mode == self._outer[-1]:
            self._outer.pop()
            if not self._outer:
                value = self._of_caller
        else:
            self._outer.append(torch.is_grad_enabled())
        self._create_node("call_function", torch._C._set_grad_enabled, (value,), {})
