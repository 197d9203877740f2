"""A property of an instance that is a plain function where it is read from the class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch

from featx.errors import ArgumentTypeError


def leave_to_callees(function: Any) -> None:
    """Let torch.compile begin with what `function` calls, where it would begin with it.

    All modules share the code of `function`, and torch.compile takes eight modules for one code at most.
    """
    frames: Any = cast("Any", torch._C)._dynamo.eval_frame
    if hasattr(frames, "set_code_exec_strategy"):
        skip, default = frames._FrameAction.SKIP, frames._FrameAction.DEFAULT
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, default))
    elif hasattr(frames, "skip_code"):
        frames.skip_code(function.__code__)


def with_code_of_its_own(function: Any) -> Any:
    """Return a function with a copy of its code: torch.compile takes eight modules for one code at most."""
    function.__code__ = function.__code__.replace()
    return function


class InstanceForward(property):
    """The forward function of a graph module, which each instance has of its own.

    Read from the class it is a function that calls the instance's. torch.fx reads it there and calls it with proxies.
    """

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Return the instance's function, or one that looks for it."""
        # Dynamo traces this, and has no super() of a property.
        return forward_of_instance if instance is None else cast(Callable[[Any], Any], self.fget)(instance)


leave_to_callees(InstanceForward.__get__)


def forward_of_instance(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the forward function of `self`.

    Raises:
        ArgumentTypeError: torch.fx traces it.
    """
    if not isinstance(args, tuple):  # pyright: ignore[reportUnnecessaryIsInstance] - torch.fx has a proxy for all
        raise ArgumentTypeError(
            f"torch.fx, and prepare_fx of torch.ao.quantization, cannot trace a featx {type(self).__name__}; give them "
            "featx.to_torch_fx(module)"
        )
    return self.forward(*args, **kwargs)
