"""FLOPs of matrix products, convolutions, attentions and Fourier transforms: what the formulas of operators are.

Each takes the arguments of an operator and, as `result`, what it returned.
"""

from __future__ import annotations

from math import log2, prod
from typing import Any

import torch

from featx.ir.overloads import tensors_among


def matrix_product(a: torch.Tensor, b: torch.Tensor, *_: Any, result: torch.Tensor, **__: Any) -> int:
    """Count `mm`, `bmm` and the like."""
    return 2 * result.numel() * a.shape[-1]


def added_product(_: torch.Tensor, a: torch.Tensor, *rest: Any, result: torch.Tensor, **__: Any) -> int:
    """Count `addmm` and the like."""
    return 2 * result.numel() * a.shape[-1]


def added_batch_product(_: torch.Tensor, a: torch.Tensor, *rest: Any, result: torch.Tensor, **__: Any) -> int:
    """Count `addbmm`, which sums over the batch."""
    return 2 * result.numel() * a.shape[-1] * a.shape[0]


def inner_product(a: torch.Tensor, *_: Any, **__: Any) -> int:
    """Count `dot`."""
    return 2 * a.numel()


def outer_product(_: torch.Tensor, *rest: Any, result: torch.Tensor, **__: Any) -> int:
    """Count `addr`."""
    return 2 * result.numel()


def grouped_product(a: torch.Tensor, b: torch.Tensor, *_: Any, result: torch.Tensor, **__: Any) -> int:
    """Count `_grouped_mm`, of which each group has some rows, or some of the inner dimension."""
    if a.dim() == b.dim() == 2:
        return 2 * a.shape[0] * a.shape[1] * b.shape[1]
    return 2 * result.numel() * a.shape[-1]


def convolution(
    x: torch.Tensor, weight: torch.Tensor, bias: Any, stride: Any, padding: Any, dilation: Any, transposed: bool,
    *_: Any, result: torch.Tensor, **__: Any,
) -> int:  # fmt: skip
    """Count a convolution: each output takes one filter; transposed, each input goes through one."""
    each = x if transposed else result
    return 2 * each.numel() * (weight.numel() // weight.shape[0])


def forward_convolution(_: torch.Tensor, weight: torch.Tensor, *rest: Any, result: torch.Tensor, **__: Any) -> int:
    """Count a convolution of an operator for those that are not transposed."""
    return 2 * result.numel() * (weight.numel() // weight.shape[0])


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> int:
    """Count an attention on tensors of [..., heads, length, width], with nothing skipped for a mask."""
    return 2 * prod(q.shape[:-1]) * k.shape[-2] * (q.shape[-1] + v.shape[-1])


def attention_by_length(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> int:
    """Count an attention on tensors of [batch, length, heads, width]."""
    return 2 * prod(q.shape[:-1]) * k.shape[1] * (q.shape[-1] + v.shape[-1])


def multi_head_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, width: int, *_: Any, **__: Any) -> int:
    """Count an attention with its four projections."""
    batch, length, _width = q.shape
    projections = 2 * batch * width * width * (2 * length + 2 * k.shape[1])
    return projections + 4 * batch * length * k.shape[1] * width


def encoder_layer(src: torch.Tensor, width: int, *args: Any, **__: Any) -> int:
    """Count the layer of a transformer that torch runs as one operator."""
    first, second = args[12], args[14]
    feed_forward = 2 * (src.numel() // width) * (first.numel() + second.numel())
    return multi_head_attention(src, src, src, width) + feed_forward


def recurrent(x: torch.Tensor, *args: Any, **__: Any) -> int:
    """Count a recurrent layer: each step takes each weight matrix once."""
    weights = [weight for weight in tensors_among(args[:4]) if weight.dim() == 2]
    return 2 * prod(x.shape[:-1]) * sum(weight.numel() for weight in weights)


def bilinear(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, *expanded: Any, **__: Any) -> int:
    """Count `_trilinear`: products of three, summed."""
    shapes = [list(tensor.shape) for tensor in (a, b, c)]
    for shape, dims in zip(shapes, expanded, strict=False):
        for dim in dims:
            shape.insert(dim, 1)
    return 3 * prod(map(max, *shapes))


def fourier(x: torch.Tensor, dim: list[int], *_: Any, result: torch.Tensor, **__: Any) -> int:
    """Count a Fourier transform: 5 n log2 n, the usual figure, and half of that where one side is real."""
    longer = x if x.numel() >= result.numel() else result
    length = prod(longer.shape[each] for each in dim)
    share = 1.0 if x.is_complex() and result.is_complex() else 0.5
    return round(share * 5 * longer.numel() * log2(max(length, 1)))
