"""To which dtype torch.autocast casts the operations of each kind of device, in this thread."""

from __future__ import annotations

import operator

import torch

DEVICES = ("cpu", "cuda", "mps", "xpu")
# The functions that tell the state of autocast, and those of them that tell a dtype.
DTYPE_QUERIES = frozenset({torch.get_autocast_dtype, torch.get_autocast_cpu_dtype, torch.get_autocast_gpu_dtype})
AUTOCAST_QUERIES = DTYPE_QUERIES | {
    torch.is_autocast_enabled, torch.is_autocast_cpu_enabled, torch._C._is_any_autocast_enabled,
}  # fmt: skip
# For each of these devices the dtype that operations are cast to; None where they are not cast.
AutocastDtypes = tuple[torch.dtype | None, ...]

# For each of these devices whether operations are cast, and to which dtype.
AutocastState = tuple[tuple[str, bool, torch.dtype], ...]

_NONE: AutocastDtypes = (None,) * len(DEVICES)


def autocast_dtypes() -> AutocastDtypes:
    """Return what is cast now."""
    if not torch._C._is_any_autocast_enabled():
        return _NONE
    return tuple(torch.get_autocast_dtype(each) if torch.is_autocast_enabled(each) else None for each in DEVICES)


def autocast_state() -> AutocastState:
    """Return what is set now, for the devices that cast nothing too."""
    return tuple((each, torch.is_autocast_enabled(each), torch.get_autocast_dtype(each)) for each in DEVICES)


def autocast_nesting() -> int:
    """Return in how many regions of autocast this thread is.

    Torch tells it where it counts. One call of C does both, so that no interrupt comes between the two.
    """
    return list(map(operator.call, (torch.autocast_increment_nesting, torch.autocast_decrement_nesting)))[-1]


def set_autocast_nesting(depth: int) -> None:
    """Leave or enter regions of autocast without a change of what is cast, until this thread is in so many."""
    while (now := autocast_nesting()) != depth:
        (torch.autocast_decrement_nesting if now > depth else torch.autocast_increment_nesting)()
    if depth == 0:
        torch.clear_autocast_cache()


def toggle_autocast() -> None:
    """Switch autocast off where it is on, and on where it is off, and let it cast to another dtype."""
    for device in DEVICES:
        torch.set_autocast_enabled(device, not torch.is_autocast_enabled(device))
        is_half = torch.get_autocast_dtype(device) is torch.float16
        torch.set_autocast_dtype(device, torch.bfloat16 if is_half else torch.float16)
