"""The modes of torch that hold for one thread: taken before a trace, and put back whatever has happened."""

from __future__ import annotations

import gc
from collections.abc import Callable
from types import GeneratorType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from featx.tracing.environment.autocast_state import autocast_nesting, autocast_state, set_autocast_nesting
from featx.tracing.environment.compiler import not_compiled


class FunctionMode(TorchFunctionMode):
    """Lets `on_call` answer every torch call of a thread: it gets the function and its arguments."""

    def __init__(self, on_call: Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]) -> None:
        super().__init__()
        self._on_call = on_call

    @not_compiled
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._on_call(func, args, kwargs or {})


class ThreadModes:
    """Gradients, inference mode, autocast and the stacks of torch's modes, as they are when this is made.

    `leave` puts them back. It may be called twice, so that an interrupt that ends the first call does no harm.
    """

    def __init__(self) -> None:
        self._gradients = torch.is_grad_enabled()
        self._functions = torch._C._len_torch_function_stack()
        self._kernels = torch._C._len_torch_dispatch_stack()
        self._function_state = torch._C._get_torch_function_state()  # pyright: ignore[reportAttributeAccessIssue]
        self._autocast = autocast_state()
        self._nesting = autocast_nesting()
        self._no_inference: Any = None
        self._function_mode: Any = None

    def leave_inference_mode(self) -> None:
        """Leave inference mode, in which tensors count no versions."""
        self._no_inference = torch._C._InferenceMode(False)
        self._no_inference.__enter__()

    def enter(self, function_mode: Any, kernel_mode: Any, *, gradients: bool) -> None:
        """Set the mode of gradients, and push modes for functions and, unless it is None, for kernels."""
        _set_gradients(gradients)
        if kernel_mode is not None:
            torch._C._push_on_torch_dispatch_stack(kernel_mode)
        torch._C._push_on_torch_function_stack(function_mode)
        self._function_mode = function_mode

    def leave(self) -> None:
        """Put everything back as it was."""
        self._end_calls_of_mode()
        while torch._C._len_torch_function_stack() > self._functions:
            torch._C._pop_torch_function_stack()
        self._function_mode = None  # it has gone from the stack for good
        while torch._C._len_torch_dispatch_stack() > self._kernels:
            torch._C._pop_torch_dispatch_stack(None)
        if self._no_inference is not None:
            self._no_inference.__exit__(None, None, None)
            self._no_inference = None
        if torch.is_grad_enabled() is not self._gradients:
            _set_gradients(self._gradients)
        if autocast_state() != self._autocast:
            for device, enabled, dtype in self._autocast:
                torch.set_autocast_enabled(device, enabled)
                torch.set_autocast_dtype(device, dtype)
        if autocast_nesting() != self._nesting:
            set_autocast_nesting(self._nesting)
        torch._C._set_torch_function_state(self._function_state)  # pyright: ignore[reportAttributeAccessIssue]

    def _end_calls_of_mode(self) -> None:
        """Let torch push the mode for functions back where an interrupt has ended a call that it answered.

        While a mode answers, `torch.overrides` has it off the stack, in a generator that pushes it back when it ends.
        One that an interrupt leaves suspended would do so whenever the traceback is dropped. O(objects) then.
        """
        if self._function_mode is None or torch._C._len_torch_function_stack() > self._functions:
            return
        for holder in gc.get_referrers(self._function_mode):
            if isinstance(holder, GeneratorType):
                holder.close()


def _set_gradients(enabled: bool) -> None:
    """Switch gradients on or off, unseen by a trace that runs around this one."""
    with torch._C.DisableTorchFunction():
        torch._C._set_grad_enabled(enabled)
