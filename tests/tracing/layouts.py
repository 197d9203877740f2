"""What tests of rules share: tensors in every layout, their stand-ins, and what of a result a rule must get right."""

from __future__ import annotations

from typing import Any

import torch


def forms(shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    """Tensors of one shape and dtype with several layouts: plain, permuted, expanded, with gaps, channels last."""
    found = [torch.ones(shape, dtype=dtype)]
    if len(shape) > 1:
        found.append(torch.ones(shape[::-1], dtype=dtype).permute(*reversed(range(len(shape)))))
        found.append(torch.ones((1, *shape[1:]), dtype=dtype).expand(shape))
        found.append(torch.ones((*shape[:-1], 2 * shape[-1]), dtype=dtype)[..., ::2])
    if len(shape) == 4:
        found.append(torch.ones(shape, dtype=dtype).contiguous(memory_format=torch.channels_last))
    return found


def on_meta(value: Any) -> Any:
    """The same form without values, at any depth."""
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return type(value)(map(on_meta, value)) if type(value) in (list, tuple) else value


def form(value: Any) -> Any:
    """Shape, dtype, and strides where they count, of each tensor of a result; all else as it is."""
    if isinstance(value, tuple):
        return tuple(map(form, value))
    if not isinstance(value, torch.Tensor):
        return value
    steps = tuple(stride for size, stride in zip(value.shape, value.stride(), strict=True) if size > 1)
    return tuple(value.shape), value.dtype, steps if value.numel() > 1 else ()
