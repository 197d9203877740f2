"""Global settings of torch that select kernels or their precision: save and restore them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch.nn.modules import module
from torch.nn.utils import parametrize

from featx.ir.torch_layers import is_of_torch


def _hooks_of_saved_tensors() -> Any:
    """Return the function that packs tensors which are saved for gradients, if it is not one of torch's own."""
    hooks = cast(Any, torch._C)._autograd._top_saved_tensors_default_hooks(True)
    return None if hooks is None or is_of_torch(hooks[0]) else hooks[0]


def _hooks_of_all_modules() -> tuple[int, int]:
    """Return how many forward hooks and pre-hooks hold for all modules."""
    of_all: Any = module
    return len(of_all._global_forward_hooks), len(of_all._global_forward_pre_hooks)


def _deterministic_algorithms() -> tuple[bool, bool]:
    """Return whether they are used, and whether torch only warns where an operation has none."""
    return torch._C._get_deterministic_algorithms(), torch._C._get_deterministic_algorithms_warn_only()


def _set_deterministic_algorithms(value: tuple[bool, bool]) -> None:
    torch._C._set_deterministic_algorithms(value[0], warn_only=value[1])


# What each is called, and the functions that tell how it is set and set it, by their names in torch._C.
_IN_C = {
    "the kernels of scaled_dot_product_attention (flash)": ("_get_flash_sdp_enabled", "_set_sdp_use_flash"),
    "the kernels of scaled_dot_product_attention (memory-efficient)": (
        "_get_mem_efficient_sdp_enabled", "_set_sdp_use_mem_efficient",
    ),
    "the kernels of scaled_dot_product_attention (math)": ("_get_math_sdp_enabled", "_set_sdp_use_math"),
    "the kernels of scaled_dot_product_attention (cuDNN)": ("_get_cudnn_sdp_enabled", "_set_sdp_use_cudnn"),
    "the precision of matrix products": ("_get_float32_matmul_precision", "_set_float32_matmul_precision"),
    "cuDNN": ("_get_cudnn_enabled", "_set_cudnn_enabled"),
    "oneDNN": ("_get_mkldnn_enabled", "_set_mkldnn_enabled"),
}  # fmt: skip
_SWITCHES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any] | None]] = {
    **{
        name: (getattr(torch._C, getter), getattr(torch._C, setter, None))
        for name, (getter, setter) in _IN_C.items()
        if hasattr(torch._C, getter)
    },
    "deterministic algorithms": (_deterministic_algorithms, _set_deterministic_algorithms),
    "the default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    # What a context manager sets, it puts back itself.
    "the cache of parametrizations (parametrize.cached)": (lambda: parametrize._cache_enabled, None),
    "hooks of saved tensors (saved_tensors_hooks)": (_hooks_of_saved_tensors, None),
    "forward hooks of all modules (register_module_forward_hook)": (_hooks_of_all_modules, None),
}
_GETTERS = tuple([getter for getter, _ in _SWITCHES.values()])


def switches() -> tuple[Any, ...]:
    """Return how the switches are set. About two microseconds."""
    return tuple([get() for get in _GETTERS])


def put_back(before: tuple[Any, ...]) -> str:
    """Set the switches as they were when `switches` returned `before`; return the name of one that was not."""
    changed = ""
    for (name, (get, put)), value in zip(_SWITCHES.items(), before, strict=True):
        if get() != value:
            changed = name
            if put is not None:
                put(value)
    return changed
