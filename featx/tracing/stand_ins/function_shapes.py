"""What common torch functions return for tensors of a given form, without running them.

torch computes the form of many results in Python, at up to a millisecond a call. A rule answers only in the plain case
(contiguous strided tensors of one floating dtype) and gives None everywhere else. Each is tested against torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional

_META = torch.device("meta")
Rule = Callable[[tuple[Any, ...], dict[str, Any]], "torch.Tensor | None"]


def result_of(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Return a tensor of the form of `function(*args, **kwargs)`, on the meta device, or None where no rule applies."""
    rule = _RULES.get(function)
    return None if rule is None else rule(args, kwargs)


def _is_plain(value: Any) -> bool:
    return _is_strided(value) and value.is_contiguous()


def _is_strided(value: Any) -> bool:
    kind = type(value)
    if kind is not torch.Tensor and kind is not torch.nn.Parameter:
        return False
    return value.dtype in _FLOATING and value.layout is torch.strided


def _is_dense(value: Any) -> bool:
    """Say whether a tensor fills its memory without gaps, in any order of dimensions."""
    if not _is_strided(value) or not value.numel():
        return False
    last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    return last == value.numel() - 1 and 0 not in value.stride()


def _has_one_order(value: Any) -> bool:
    """Say whether the strides put the dimensions of a tensor in one order, which results keep; there may be gaps."""
    if not _is_strided(value) or 1 in value.shape or not value.numel():
        return False
    strides = value.stride()
    return 0 not in strides and len(set(strides)) == len(strides)


def _has_order(value: Any) -> bool:
    return _is_dense(value) or _has_one_order(value)


def _like(x: torch.Tensor) -> torch.Tensor:
    """Return a dense tensor of the same shape, with the dimensions in the same order."""
    strides = x.stride()
    if not _is_dense(x):
        dense, step = list(strides), 1
        for dim in sorted(range(x.dim()), key=strides.__getitem__):
            dense[dim] = step
            step *= x.shape[dim]
        strides = tuple(dense)
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=_META)


def _fresh(shape: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(tuple(map(int, shape)), dtype=dtype, device=_META)


def _same(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    x = args[0]
    if not _has_order(x) or kwargs.get("inplace") or "out" in kwargs or kwargs.get("dtype") is not None:
        return None
    return _like(x) if all(type(value) in _PLAIN_NUMBERS or type(value) is tuple for value in args[1:]) else None


def _contiguous(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    return _same(args, kwargs) if _is_plain(args[0]) and "dtype" not in kwargs else None


def _dropout(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    x: Any = args[0]
    if len(args) > 3 or kwargs.get("inplace") or not _is_dense(x):
        return None
    training = args[2] if len(args) > 2 else kwargs.get("training", True)
    probability = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
    if not isinstance(training, bool) or not isinstance(probability, (int, float)) or not 0 <= probability <= 1:
        return None
    return _like(x) if training and probability > 0 else x


def _elementwise(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    if kwargs or len(args) != 2:
        return None
    x: Any = args[0]
    y: Any = args[1]
    if not isinstance(y, torch.Tensor):
        return _like(x) if type(y) in _PLAIN_NUMBERS and _has_order(x) else None
    if not isinstance(x, torch.Tensor):
        return _like(y) if type(x) in _PLAIN_NUMBERS and _has_order(y) else None
    if x.shape == y.shape and x.stride() == y.stride() and x.dtype is y.dtype and _is_dense(x) and _is_strided(y):
        return _like(x)
    if x.dtype is not y.dtype:
        return None
    if _has_one_order(x) and _is_strided(y) and _fits_into(y.shape, x.shape):
        return _like(x)
    if _has_one_order(y) and _is_strided(x) and _fits_into(x.shape, y.shape) and x.numel() == max(x.shape, default=1):
        return _like(y)  # with one dimension, the first operand says nothing of an order
    if not _is_plain(x) or not _is_plain(y):
        return None
    if x.shape == y.shape or _fits_into(y.shape, x.shape):
        return _fresh(x.shape, x.dtype)
    return _fresh(y.shape, y.dtype) if _fits_into(x.shape, y.shape) else None


def _written(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    x: Any = args[0]
    if len(args) != 2 or kwargs or not x.is_meta or not _has_order(x) or x.requires_grad:
        return None
    y = args[1]
    if type(y) not in _PLAIN_NUMBERS and not (_is_strided(y) and y.dtype is x.dtype and _fits_into(y.shape, x.shape)):
        return None
    if isinstance(y, torch.Tensor) and y.requires_grad:
        return None
    torch.autograd.graph.increment_version(x)
    return x


def _reflected(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    return _elementwise(args[::-1], kwargs)


def _fits_into(small: torch.Size, large: torch.Size) -> bool:
    if len(small) > len(large):
        return False
    return all(one in (1, other) for one, other in zip(reversed(small), reversed(large), strict=False))


def _comparison(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    result = _elementwise(args, kwargs)
    if result is None:
        return None
    return torch.empty_strided(result.shape, result.stride(), dtype=torch.bool, device=_META)


def _clamp(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    bounds = (*args[1:], *kwargs.values())
    known = bool(bounds) and all(bound is None or type(bound) in _PLAIN_NUMBERS for bound in bounds)
    return _like(args[0]) if known and _has_order(args[0]) else None


def _normalize(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    given = [value for key, value in kwargs.items() if key != "out" or value is not None]
    known = all(type(value) in _PLAIN_NUMBERS for value in (*args[1:], *given))
    is_clear = _is_plain(args[0]) or _has_one_order(args[0])
    return _like(args[0]) if known and is_clear and args[0].numel() and args[0].dim() else None


def _masked_fill(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    if kwargs or len(args) != 3 or type(args[2]) not in _PLAIN_NUMBERS:
        return None
    x: Any = args[0]
    mask: Any = args[1]
    known = _is_plain(x) and isinstance(mask, torch.Tensor) and mask.dtype is torch.bool
    return _fresh(x.shape, x.dtype) if known and _fits_into(mask.shape, x.shape) else None


def _matmul(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    if kwargs or len(args) != 2 or not all(map(_is_strided, args)):
        return None
    x, y = args
    fit = x.dtype is y.dtype and x.dim() == y.dim() > 2 and x.shape[:-2] == y.shape[:-2] and x.shape[-1] == y.shape[-2]
    return _fresh((*x.shape[:-1], y.shape[-1]), x.dtype) if fit else None


def _reshape(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    x: Any = args[0]
    if kwargs or not _is_strided(x) or not x.is_meta or not x.numel():
        return None
    shape = args[1] if len(args) == 2 and isinstance(args[1], (tuple, list)) else args[1:]
    try:
        return x.view(list(shape))
    except (RuntimeError, TypeError):
        # Where no view can be had it is a copy.
        sizes = _without_wildcard(shape, x.numel())
        return None if sizes is None else _fresh(sizes, x.dtype)


def _without_wildcard(shape: Any, numel: int) -> list[int] | None:
    sizes = list(shape)
    if not all(type(size) is int for size in sizes) or sizes.count(-1) > 1:
        return None
    known = math.prod(size for size in sizes if size != -1)
    if -1 in sizes and known > 0:
        sizes[sizes.index(-1)] = numel // known
    return sizes if min(sizes, default=1) > 0 and math.prod(sizes) == numel else None


def _layer_norm(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    x, shape = args[0], args[1] if len(args) > 1 else kwargs.get("normalized_shape", ())
    weights = [value for value in (*args[2:4], kwargs.get("weight"), kwargs.get("bias")) if value is not None]
    if not _is_strided(x) or not shape or tuple(x.shape[-len(shape) :]) != tuple(shape):
        return None
    fit = all(_is_plain(w) and w.dtype is x.dtype and tuple(w.shape) == tuple(shape) for w in weights)
    return _fresh(x.shape, x.dtype) if fit else None


def _linear(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    x, weight = args[0], args[1] if len(args) > 1 else kwargs.get("weight")
    bias = args[2] if len(args) > 2 else kwargs.get("bias")
    known = all(_is_plain(value) and value.dtype is x.dtype for value in (x, weight, bias) if value is not None)
    if not known or weight is None or weight.dim() != 2 or x.dim() < 1 or x.shape[-1] != weight.shape[1]:
        return None
    if bias is not None and bias.shape != weight.shape[:1]:
        return None
    return _fresh((*x.shape[:-1], weight.shape[0]), x.dtype)


def _cat(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    tensors, dim = args[0], args[1] if len(args) > 1 else kwargs.get("dim", 0)
    if set(kwargs) - {"dim"} or not isinstance(tensors, (tuple, list)) or not tensors or type(dim) is not int:
        return None
    first = tensors[0]
    if not all(_is_plain(x) and x.dtype is first.dtype and x.dim() == first.dim() for x in tensors):
        return None
    dim += first.dim() if dim < 0 else 0
    shapes = [list(x.shape) for x in tensors]
    if not 0 <= dim < first.dim() or any(
        s[:dim] + s[dim + 1 :] != shapes[0][:dim] + shapes[0][dim + 1 :] for s in shapes
    ):
        return None
    return _fresh((*shapes[0][:dim], sum(s[dim] for s in shapes), *shapes[0][dim + 1 :]), first.dtype)


def _grid_sample(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    # torch computes it by parts, in some thirty operators.
    if len(args) < 2 or not all(map(_is_plain, args[:2])) or "grid" in kwargs:
        return None
    x, grid = args[:2]
    options = {**dict(zip(("mode", "padding_mode", "align_corners"), args[2:], strict=False)), **kwargs}
    is_known = options.pop("mode", "bilinear") in ("bilinear", "nearest")
    is_known = is_known and options.pop("padding_mode", "zeros") in ("zeros", "border", "reflection")
    if not is_known or options.keys() - {"align_corners"} or x.dim() not in (4, 5) or grid.dim() != x.dim():
        return None
    if x.dtype is not grid.dtype or x.shape[0] != grid.shape[0] or grid.shape[-1] != x.dim() - 2 or not x.numel():
        return None
    return _fresh((*x.shape[:2], *grid.shape[1:-1]), x.dtype)


_FLOATING = frozenset({torch.float32, torch.float64, torch.float16, torch.bfloat16})
_PLAIN_NUMBERS = frozenset({int, float})


def _named(*names: str) -> Iterator[Callable[..., Any]]:
    for name in names:
        for owner in (torch, torch.Tensor, functional, torch._C._nn):  # pyright: ignore[reportAttributeAccessIssue]
            function = getattr(owner, name, None)
            if function is not None:
                yield function


_RULES: dict[Callable[..., Any], Rule] = {
    **dict.fromkeys(
        _named("gelu", "relu", "silu", "sigmoid", "tanh", "exp", "sqrt", "rsqrt", "neg", "abs", "erf", "hardswish",
               "hardsigmoid", "leaky_relu", "elu", "softplus", "mish", "relu6"),
        _same,
    ),
    **dict.fromkeys(_named("add", "sub", "mul", "div", "maximum", "minimum"), _elementwise),
    **dict.fromkeys(_named("gt", "lt", "ge", "le", "eq", "ne"), _comparison),
    **dict.fromkeys(_named("layer_norm"), _layer_norm),
    **dict.fromkeys(_named("softmax", "log_softmax", "roll"), _contiguous),
    **dict.fromkeys(_named("linear"), _linear),
    **dict.fromkeys(_named("clamp"), _clamp),
    **dict.fromkeys(_named("masked_fill"), _masked_fill),
    **dict.fromkeys(_named("matmul"), _matmul),
    **dict.fromkeys(_named("reshape"), _reshape),
    **dict.fromkeys(_named("cat"), _cat),
    functional.dropout: _dropout,
    functional.grid_sample: _grid_sample,
    functional.normalize: _normalize,
    torch.Tensor.__matmul__: _matmul,
    **dict.fromkeys((torch.Tensor.add_, torch.Tensor.sub_, torch.Tensor.mul_, torch.Tensor.div_), _written),
    **dict.fromkeys((torch.Tensor.__iadd__, torch.Tensor.__isub__, torch.Tensor.__imul__), _written),
    torch.Tensor.__rsub__: _reflected,
    torch.Tensor.__eq__: _comparison,
    torch.Tensor.__ne__: _comparison,
}  # fmt: skip
