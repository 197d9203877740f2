"""The switches of torch that hold for the whole process and decide which kernels compute, and how."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_SWITCHES: dict[str, Callable[[], Any]] = {
    name: function
    for name, function in {
        "the kernels of scaled_dot_product_attention (flash)": getattr(torch._C, "_get_flash_sdp_enabled", None),
        "the kernels of scaled_dot_product_attention (memory-efficient)": getattr(
            torch._C, "_get_mem_efficient_sdp_enabled", None
        ),
        "the kernels of scaled_dot_product_attention (math)": getattr(torch._C, "_get_math_sdp_enabled", None),
        "the kernels of scaled_dot_product_attention (cuDNN)": getattr(torch._C, "_get_cudnn_sdp_enabled", None),
        "the precision of matrix products": getattr(torch._C, "_get_float32_matmul_precision", None),
        "cuDNN": getattr(torch._C, "_get_cudnn_enabled", None),
        "oneDNN": getattr(torch._C, "_get_mkldnn_enabled", None),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled,
        "the default dtype": torch.get_default_dtype,
    }.items()
    if function is not None
}
_GETTERS = tuple(_SWITCHES.values())


def switches() -> tuple[Any, ...]:
    """Return how the switches are set. About a microsecond."""
    return tuple([get() for get in _GETTERS])


def name_of_difference(before: tuple[Any, ...]) -> str:
    """Return the name of a switch that is set otherwise than in `before`."""
    return next(name for name, one, other in zip(_SWITCHES, before, switches(), strict=True) if one != other)
