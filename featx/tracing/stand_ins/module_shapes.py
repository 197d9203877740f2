"""What common leaf modules of torch.nn return for an input of a given form, without running them.

A rule answers only in the plain case and gives None everywhere else; then the module runs on the meta device. Each rule
is tested against the real module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

_META = torch.device("meta")
Rule = Callable[[Any, torch.Tensor], "torch.Tensor | None"]


def output_of(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return a value of the form that `module(*args)` has, on the meta device, or None where no rule applies. O(1)."""
    if type(module) is nn.MultiheadAttention:
        return _attention(module, args, kwargs)
    if type(module) is nn.LSTMCell or type(module) is nn.GRUCell:
        return None if kwargs else _cell(module, *args)
    rule = _RULES.get(type(module))
    if rule is None or kwargs or len(args) != 1:
        return None
    x = args[0]
    if type(x) is not torch.Tensor or not x.is_meta or not x.is_floating_point():
        return None
    kind = type(module)
    if (
        x.is_contiguous()
        or (kind in _KEEP_CHANNELS_LAST and _is_channels_last(x))
        or (kind is nn.Linear and x.dim() == 2)  # a head on the first token of each image
    ):
        return rule(module, x)
    return None


def _is_channels_last(x: torch.Tensor) -> bool:
    return x.dim() == 4 and 1 not in x.shape and x.is_contiguous(memory_format=torch.channels_last)


def _attention(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Tensor, Any] | None:
    plain = all(type(x) is torch.Tensor and x.is_meta and x.dim() == 3 and x.dtype == torch.float32 for x in args)
    if (
        len(args) != 3
        or not plain
        or not module.batch_first
        or module.add_zero_attn
        or module.bias_k is not None
        or set(kwargs) - {"need_weights"}
        or not _is_plain(module, args[0])
    ):
        return None
    (batch, length, width), source = args[0].shape, args[1].shape[1]
    if (
        width != module.embed_dim
        or args[1].shape != (batch, source, module.kdim)
        or args[2].shape != (batch, source, module.vdim)
    ):
        return None
    is_self = args[0] is args[1] is args[2]
    if is_self and not module.training and not torch.is_grad_enabled() and module.num_heads % 2 == 0:
        return None  # torch's fast path
    # In memory the sequence comes first, however the query lies there.
    output = torch.empty((length, batch, width), dtype=args[0].dtype, device=_META).transpose(0, 1)
    if not kwargs.get("need_weights", True):
        return output, None
    return output, torch.empty((batch, length, source), dtype=args[0].dtype, device=_META)


def _cell(module: Any, x: Any = None, state: Any = None, *others: object) -> Any:
    """One step of a recurrent cell. On the meta device torch decomposes it in Python, which takes milliseconds."""
    is_lstm = type(module) is nn.LSTMCell
    given: list[Any] = [] if state is None else [*state] if is_lstm and type(state) is tuple else [state]
    if others or len(given) not in (0, 1 + is_lstm) or not all(map(_is_plain_matrix, (x, *given))):
        return None
    shape, weight = (x.shape[0], module.hidden_size), module.weight_ih
    if x.shape[1] != module.input_size or any(each.shape != shape or not each.is_contiguous() for each in given):
        return None
    if not all(each.dtype == x.dtype for each in (*module._parameters.values(), *given) if each is not None):
        return None
    if not (weight.is_contiguous() and module.weight_hh.is_contiguous()) or 0 in shape:
        return None
    step = torch.empty(shape, dtype=x.dtype, device=_META)
    return (step, torch.empty(shape, dtype=x.dtype, device=_META)) if is_lstm else step


def _is_plain_matrix(x: Any) -> bool:
    return type(x) is torch.Tensor and x.is_meta and x.is_floating_point() and x.dim() == 2


def _fresh(x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    # `x.new_empty` is a Python function on the meta device, and ten times slower.
    order = torch.contiguous_format if x.is_contiguous() else torch.channels_last
    return torch.empty(shape, dtype=x.dtype, device=_META, memory_format=order)


def _same(module: Any, x: torch.Tensor) -> torch.Tensor:
    return _fresh(x, x.shape)


def _activation(module: Any, x: torch.Tensor) -> torch.Tensor:
    if not module.inplace:
        return _fresh(x, x.shape)
    torch.autograd.graph.increment_version(x)
    return x


def _identity(module: Any, x: torch.Tensor) -> torch.Tensor:
    return x


def _dropout(module: Any, x: torch.Tensor) -> torch.Tensor | None:
    if type(module) is not nn.Dropout and x.dim() != _DROPOUT_DIMS[type(module)]:
        return None
    return _activation(module, x) if module.training and module.p > 0 else x


def _batch_norm(module: Any, x: torch.Tensor) -> torch.Tensor | None:
    if x.dim() not in _BATCH_NORM_DIMS[type(module)] or x.shape[1] != module.num_features or not _is_plain(module, x):
        return None
    if module.training and x.numel() == x.shape[1]:
        return None  # one value a channel, which it refuses
    return _fresh(x, x.shape)


def _layer_norm(module: Any, x: torch.Tensor) -> torch.Tensor | None:
    shape = module.normalized_shape
    return _fresh(x, x.shape) if x.shape[-len(shape) :] == shape and _is_plain(module, x) else None


def _linear(module: Any, x: torch.Tensor) -> torch.Tensor | None:
    if x.dim() == 0 or x.shape[-1] != module.in_features or not _is_plain(module, x):
        return None
    return torch.empty((*x.shape[:-1], module.out_features), dtype=x.dtype, device=_META)


def _convolution(module: Any, x: torch.Tensor) -> torch.Tensor | None:
    dims = len(module.kernel_size)
    if (
        module.padding_mode != "zeros"
        or x.dim() != dims + 2
        or x.shape[1] != module.in_channels
        or not _is_plain(module, x)
    ):
        return None
    sizes: list[int] = []
    for axis in range(dims):
        size, kernel, dilation = x.shape[axis + 2], module.kernel_size[axis], module.dilation[axis]
        padding = module.padding
        if padding == "same":
            sizes.append(size)
            continue
        around = 0 if padding == "valid" else 2 * padding[axis]
        length = (size + around - dilation * (kernel - 1) - 1) // module.stride[axis] + 1
        if length < 1:
            return None
        sizes.append(length)
    return _fresh(x, (x.shape[0], module.out_channels, *sizes))


def _pool(module: Any, x: torch.Tensor) -> torch.Tensor | None:
    if x.dim() != 4 or module.ceil_mode or getattr(module, "return_indices", False):
        return None
    sizes: list[int] = []
    for axis in range(2):
        kernel, padding = _at(module.kernel_size, axis), _at(module.padding, axis)
        stride = _at(module.stride, axis) if module.stride is not None else kernel
        reach = _at(getattr(module, "dilation", 1), axis) * (kernel - 1)
        length = (x.shape[axis + 2] + 2 * padding - reach - 1) // stride + 1
        if length < 1 or 2 * padding > kernel:
            return None
        sizes.append(length)
    return _fresh(x, (*x.shape[:2], *sizes))


def _at(value: Any, axis: int) -> int:
    return value[axis] if isinstance(value, (tuple, list)) else value


def _adaptive_pool(module: Any, x: torch.Tensor) -> torch.Tensor | None:
    size = module.output_size
    pair = tuple(size) if isinstance(size, (tuple, list)) else (size, size)
    if x.dim() != 4 or pair[0] is None or pair[1] is None or 0 in x.shape:
        return None
    return _fresh(x, (*x.shape[:2], *pair))


def _is_plain(module: nn.Module, x: torch.Tensor) -> bool:
    """Say whether the weight has the dtype of `x` and a contiguous layout, so that the result has them too."""
    weight = module._parameters.get("weight")
    return weight is None or (weight.dtype == x.dtype and weight.is_contiguous())


_DROPOUT_DIMS = {nn.Dropout1d: 3, nn.Dropout2d: 4, nn.Dropout3d: 5}
_BATCH_NORM_DIMS = {nn.BatchNorm1d: (2, 3), nn.BatchNorm2d: (4,), nn.BatchNorm3d: (5,)}
_RULES: dict[type, Rule] = {
    nn.Identity: _identity,
    **dict.fromkeys((nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d), _dropout),
    **dict.fromkeys((nn.ReLU, nn.ReLU6, nn.SiLU, nn.Hardswish, nn.Hardsigmoid, nn.ELU, nn.LeakyReLU), _activation),
    **dict.fromkeys((nn.GELU, nn.Sigmoid, nn.Tanh, nn.Softplus), _same),
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), _batch_norm),
    nn.LayerNorm: _layer_norm,
    nn.Linear: _linear,
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), _convolution),
    nn.AdaptiveAvgPool2d: _adaptive_pool,
    **dict.fromkeys((nn.MaxPool2d, nn.AvgPool2d), _pool),
}
_KEEP_CHANNELS_LAST = frozenset({nn.Conv2d, nn.BatchNorm2d, nn.Identity, nn.Dropout, nn.ReLU, nn.SiLU, nn.GELU})
