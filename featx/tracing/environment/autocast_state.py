"""To which dtype torch.autocast casts the operations of each kind of device, in this thread."""

from __future__ import annotations

import torch

DEVICES = ("cpu", "cuda", "mps", "xpu")
# For each of these devices the dtype that operations are cast to; None where they are not cast.
AutocastDtypes = tuple[torch.dtype | None, ...]

_NONE: AutocastDtypes = (None,) * len(DEVICES)


def autocast_dtypes() -> AutocastDtypes:
    """Return what is cast now."""
    if not torch._C._is_any_autocast_enabled():
        return _NONE
    return tuple(torch.get_autocast_dtype(each) if torch.is_autocast_enabled(each) else None for each in DEVICES)


def toggle_autocast() -> None:
    """Switch autocast off where it is on, and on where it is off."""
    for device in DEVICES:
        torch.set_autocast_enabled(device, not torch.is_autocast_enabled(device))
