"""Keep torch's compiler out of code of featx that runs inside of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

_Method = TypeVar("_Method", bound=Callable[..., Any])


def not_compiled(method: _Method) -> _Method:
    """Mark a method of a mode, so that the compiler neither compiles it nor what it calls.

    `torch.cond`, for example, compiles what it calls, and would go on with the modes that are entered. Decorators of
    torch with this effect load the compiler, which takes seconds; this one does not.
    """
    return _skipped(method, "SKIP")


def not_compiled_itself(method: _Method) -> _Method:
    """Mark a method that calls code of models, so that the compiler takes what it calls alone, each by itself."""
    return _skipped(method, "DEFAULT")


def _skipped(method: _Method, inside: str) -> _Method:
    frames: Any = torch._C._dynamo.eval_frame  # pyright: ignore[reportAttributeAccessIssue]
    strategy = getattr(frames, "_FrameExecStrategy", None)
    if strategy is not None:
        action = frames._FrameAction
        frames.set_code_exec_strategy(method.__code__, strategy(action.SKIP, getattr(action, inside)))
    return method


def is_in_jit_trace() -> bool:
    """Say whether torch.jit.trace records what runs."""
    return torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]
