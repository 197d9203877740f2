"""Checks of inputs that a symbolic trace has fixed."""

from __future__ import annotations

from typing import Any

import torch

from featx.errors import TraceError
from featx.ir.equality import is_same
from featx.ir.runtime_checks import runtime_check
from featx.tracing.guards.scripted_checks import is_same_in_script


@runtime_check
def check_is_none(value: Any | None, name: str) -> None:
    """Raise if an input that was traced as None is given.

    Raises:
        TraceError: `value` is not None.
    """
    if value is not None:
        raise TraceError(
            f"this graph was traced with {name}=None, and {name} is given now; "
            f"trace again with concrete_args={{'{name}': featx.PH}} to keep it open"
        )


@runtime_check
def check_is_same(value: Any, expected: Any, name: str) -> None:
    """Raise if an input differs from the value that it was traced with.

    Raises:
        TraceError: `value` is not of the class of `expected`, or not equal to it.
    """
    if torch.jit.is_scripting():  # pyright: ignore[reportPrivateImportUsage]
        if not is_same_in_script(value, expected):
            raise TraceError(f"this graph was traced with another {name} than is given now")
    elif not is_same(value, expected):
        raise _refusal_of(value, expected, name)


def _refusal_of(value: Any, expected: Any, name: str) -> TraceError:  # TorchScript cannot parse `!r`
    return TraceError(f"this graph was traced with {name}={expected!r}, and {name}={value!r} is given now")
