"""Watch the kernels that run during a trace: those of calls that the trace cannot see, and those that write the model.

A scripted function, or a C++ extension, calls torch's kernels without a word to `TorchFunctionMode`. What it computes
from followed values would be a constant of the graph, and what it writes into them would be lost.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from featx.ir.overloads import Signatures
from featx.tracing.environment.compiler import not_compiled
from featx.tracing.environment.generators import TraceGenerators
from featx.tracing.stand_ins.dynamic_shapes import DynamicShapes, may_have_dynamic_shape
from featx.tree import tensors_in

# Gets a kernel, its arguments, and the tensors among these.
OnUnrecorded = Callable[[Any, tuple[Any, ...], dict[str, Any], list[torch.Tensor]], Any]
OnKernel = Callable[[Any, list[torch.Tensor]], Any]


class Kernels(TorchDispatchMode):
    """Hands the kernels of one thread to a trace, while it is entered.

    Args:
        on_unrecorded: is called with each kernel outside of recorded calls, and the tensors that it gets; what it
            returns is the result of the kernel, if not None.
        on_write: is called, wherever it runs, with each kernel that may write, and the tensors that it may write; where
            it is given, kernels draw from generators of this trace alone. None costs nothing.
        on_dynamic_shape: is called, where `on_write` is given too, before each kernel whose result has, or may have,
            a shape that depends on values.
        on_result: is called, where `on_write` is given too, with the tensors that each kernel gets, and its result.

    Attributes:
        shapes: the shapes of such results.
    """

    supports_higher_order_operators = True  # torch.cond and the like

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # What torch does to keep its compiler away from a mode loads that compiler, which takes seconds.
        return False

    def __init__(
        self,
        on_unrecorded: OnUnrecorded,
        on_write: OnKernel | None,
        on_dynamic_shape: Callable[[], None] | None = None,
        on_result: Callable[[list[torch.Tensor], Any], None] | None = None,
    ) -> None:
        super().__init__()
        self._on_unrecorded = on_unrecorded
        self._on_dynamic_shape = on_dynamic_shape
        self._on_result = on_result
        self.on_write = on_write
        self.shapes = DynamicShapes()
        self._signatures = Signatures()
        self._generators = TraceGenerators()
        # How many recorded calls the running code is inside of.
        self.depth = 0
        # Whether the model has entered a dispatch mode around the recorded call that runs, or ran last.
        self.is_under_another = False
        # How many kernels have run, and elements been computed, where `on_write` is given.
        self.kernels_run = 0
        self.elements = 0

    def start(self) -> None:
        """Take the state of the generator from which kernels of the CPU draw."""
        self._generators.start()

    @not_compiled
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunction():
            if not self.depth:
                result = self._on_unrecorded(func, args, kwargs or {}, tensors_in((args, kwargs)))
                if result is not None:
                    return result
            if self.on_write is not None:
                signature = self._signatures.of(func)
                # The branches of an operator of higher order come by themselves.
                written = [] if signature is None else list(signature.targets(args, kwargs or {}))
                if written:
                    self.on_write(func, written)
            is_dynamic = self.watches_all and may_have_dynamic_shape(func, args)
            if is_dynamic and self.shapes.are_expected:
                return self.shapes.run(func, args, kwargs or {})
            if is_dynamic and self._on_dynamic_shape is not None:
                self._on_dynamic_shape()
            watches_draws = self.depth or self.on_write is not None
            if watches_draws and torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
                result = self._generators.draw(func, args, kwargs or {})
            else:
                result = func(*args, **kwargs) if kwargs else func(*args)
            if is_dynamic:
                self.shapes.note(func, result)
            if self.on_write is not None and self._on_result is not None:
                self._on_result(tensors_in((args, kwargs)), result)
            if self.on_write is not None:
                self.kernels_run += 1
                self.elements += result.numel() if type(result) is torch.Tensor else 0
            return result

    @property
    def watches_all(self) -> bool:
        """Whether kernels inside of recorded calls are watched too."""
        return self.on_write is not None or self.shapes.are_expected

    def is_on_top(self) -> bool:
        """Say whether this is the innermost dispatch mode, and not one that the model has entered."""
        return cast(Any, torch.utils)._python_dispatch._get_current_dispatch_mode() is self

    def recorded(self) -> _Recorded:
        """Return a context for a recorded call."""
        return _Recorded(self)

    @contextmanager
    def drawing(self) -> Generator[None]:
        """Let kernels inside of a recorded call draw from generators of this trace alone."""
        if self.watches_all:  # they do so anyway
            yield
            return
        torch._C._push_on_torch_dispatch_stack(self)
        try:
            yield
        finally:
            torch._C._pop_torch_dispatch_stack(None)


class _Recorded:
    """Counts the calls; where writes are not asked for the kernels inside are not observed at all, which costs less."""

    __slots__ = ("_is_off", "_kernels")

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._is_off = False

    def __enter__(self) -> None:
        kernels = self._kernels
        kernels.depth += 1
        if kernels.depth == 1:
            kernels.is_under_another = not kernels.is_on_top()
            self._is_off = not kernels.watches_all and not kernels.is_under_another
            if self._is_off:
                torch._C._pop_torch_dispatch_stack(None)

    def __exit__(self, *error: object) -> None:
        self._kernels.depth -= 1
        if self._is_off:
            torch._C._push_on_torch_dispatch_stack(self._kernels)
