"""What common torch functions return for tensors of a given form, without running them.

torch computes the form of many results in Python, at up to a millisecond a call. A rule answers only in the plain case
(contiguous strided tensors of one floating dtype) and gives None everywhere else. Each is tested against torch.
"""

from __future__ import annotations

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
    """Say whether a tensor fills its memory without gaps, in any order of dimensions; results then have that order."""
    if not _is_strided(value) or not value.numel():
        return False
    last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    return last == value.numel() - 1 and 0 not in value.stride()


def _like(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=_META)


def _fresh(shape: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(tuple(map(int, shape)), dtype=dtype, device=_META)


def _same(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    x = args[0]
    if not _is_dense(x) or kwargs.get("inplace") or "out" in kwargs or kwargs.get("dtype") is not None:
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
        return _like(x) if type(y) in _PLAIN_NUMBERS and _is_dense(x) else None
    if not isinstance(x, torch.Tensor):
        return _like(y) if type(x) in _PLAIN_NUMBERS and _is_dense(y) else None
    if x.shape == y.shape and x.stride() == y.stride() and x.dtype is y.dtype and _is_dense(x) and _is_strided(y):
        return _like(x)
    if not _is_plain(x) or not _is_plain(y) or x.dtype is not y.dtype:
        return None
    if x.shape == y.shape or _fits_into(y.shape, x.shape):
        return _fresh(x.shape, x.dtype)
    return _fresh(y.shape, y.dtype) if _fits_into(x.shape, y.shape) else None


def _fits_into(small: torch.Size, large: torch.Size) -> bool:
    if len(small) > len(large):
        return False
    return all(one in (1, other) for one, other in zip(reversed(small), reversed(large), strict=False))


def _comparison(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    result = _elementwise(args, kwargs)
    if result is None:
        return None
    return torch.empty_strided(result.shape, result.stride(), dtype=torch.bool, device=_META)


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
    **dict.fromkeys(_named("cat"), _cat),
    functional.dropout: _dropout,
    torch.Tensor.__rsub__: _elementwise,
    torch.Tensor.__eq__: _comparison,
    torch.Tensor.__ne__: _comparison,
}  # fmt: skip
