"""Write down the shape and dtype of what a node computes, where a trace or a pass left them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch


def form_of(meta: Mapping[str, Any]) -> tuple[str, str]:
    """Return the shape and the dtype in a node's `meta`, as texts; "" for what is not known."""
    if "shape" in meta:
        return shape_text(meta["shape"]), _dtype_text(meta.get("dtype"))
    # What shape propagation, and what other tools, leave behind.
    forms = [form for form in _flat(meta.get("tensor_meta", meta.get("val"))) if hasattr(form, "shape")]
    shapes = ", ".join([shape_text(form.shape) for form in forms])
    dtypes = dict.fromkeys(_dtype_text(getattr(form, "dtype", None)) for form in forms)
    return shapes, ", ".join(dtypes)


def _flat(value: Any) -> list[Any]:
    # A named tuple with a shape describes one tensor.
    if isinstance(value, (tuple, list)) and not hasattr(value, "shape"):
        return [leaf for item in cast(Sequence[Any], value) for leaf in _flat(item)]
    return [value]


def shape_text(shape: Any) -> str:
    """Write a shape as people do: `1×3×224×224`, and `scalar` for one without dimensions."""
    try:
        lengths = [str(length) for length in shape]
    except TypeError:
        return str(shape)
    return "×".join(lengths) or "scalar"


def _dtype_text(dtype: object) -> str:
    return str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else ""
