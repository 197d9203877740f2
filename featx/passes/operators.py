"""A dispatch mode that sees basic operators only."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from featx.ir.overloads import Signature, Signatures
from featx.tracing.environment.compiler import not_compiled

_ASKS_DEVICE = torch.ops.prim.device.default


class OperatorMode(TorchDispatchMode):
    """A dispatch mode that gets basic operators only, and those of higher order, in `on_operator`.

    In inference mode composite ones (`linear`, `batch_norm`) come here whole; they are taken apart.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self._signatures = Signatures()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # What torch does to keep its compiler away from a mode loads that compiler, which takes seconds.
        return False

    @not_compiled
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Take an operator apart, or hand it to `on_operator`."""
        if func is _ASKS_DEVICE and (device := getattr(args[0], "fake_device", None)) is not None:
            return device  # every second call on fake tensors asks for it
        signature = self._signatures.of(func)
        if signature is not None and signature.is_composite:
            with self:
                return func.decompose(*args, **(kwargs or {}))
        return self.on_operator(func, signature, args, kwargs or {})

    def on_operator(self, func: Any, signature: Signature | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator; `signature` is None for one of higher order."""
        return func(*args, **kwargs)
