"""output_of: what a rule says of a module is what the real module gives on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from featx.tracing.shapes import output_of

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64)
SHAPES: tuple[tuple[int, ...], ...] = (
    (), (4,), (2, 4), (1, 4), (2, 4, 6), (2, 4, 1), (0, 4, 6), (2, 4, 6, 8), (1, 4, 7, 5), (2, 4, 1, 1), (2, 1, 4, 4),
    (2, 4, 5, 6, 7), (1, 4, 8, 8, 8),
)  # fmt: skip


def forms(shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    """Tensors of one shape and dtype with several layouts in memory: plain, permuted, channels last, expanded, sliced."""
    found = [torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)]
    if len(shape) > 1:
        found.append(torch.ones(shape[::-1], dtype=dtype).permute(*reversed(range(len(shape)))))
        found.append(torch.ones((1, *shape[1:]), dtype=dtype).expand(shape))
        found.append(torch.ones((*shape[:-1], 2 * shape[-1]), dtype=dtype)[..., ::2])
    if len(shape) == 4:
        found.append(torch.ones(shape, dtype=dtype).contiguous(memory_format=torch.channels_last))
    return found


def on_meta(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def form(value: Any, argument: Any) -> Any:
    """What a rule has to get right: shape, dtype, strides where they count, and whether the memory is the argument's."""
    if isinstance(value, tuple):
        return tuple(form(item, argument) for item in value)
    if not isinstance(value, torch.Tensor):
        return value
    steps = tuple(stride for size, stride in zip(value.shape, value.stride(), strict=True) if size > 1)
    is_same = value is argument or (not value.is_meta and value.numel() > 0 and value.data_ptr() == argument.data_ptr())
    return tuple(value.shape), value.dtype, steps if value.numel() > 1 else (), is_same and value.numel() > 0


def check(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> bool:
    """Compare the rule with the module; return whether there is an answer."""
    kwargs = kwargs or {}
    metas = tuple(on_meta(x) for x in args)
    answer = output_of(module, metas, kwargs)
    if answer is None:
        return False
    with torch.no_grad():
        result = module(*args, **kwargs)
    assert form(answer, metas[0]) == form(result, args[0]), f"{module} on {form(args[0], None)}"
    for value in answer if isinstance(answer, tuple) else (answer,):
        assert value is None or value.is_meta
    return True


INPLACE = (nn.ReLU, nn.ReLU6, nn.SiLU, nn.Hardswish, nn.Hardsigmoid, nn.ELU, nn.LeakyReLU)
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
ELEMENTWISE: list[Any] = [
    nn.Identity, *INPLACE, *[lambda kind=kind: kind(inplace=True) for kind in INPLACE],
    nn.GELU, lambda: nn.GELU("tanh"), nn.Sigmoid, nn.Tanh, nn.Softplus, nn.PReLU, lambda: nn.PReLU(4),
    *[lambda kind=kind, p=p, inplace=inplace: kind(p, inplace) for kind in DROPOUTS for p in (0.0, 0.5, 1.0)
      for inplace in (False, True)],
]  # fmt: skip
NORMS: list[Any] = [
    lambda: nn.BatchNorm1d(4), lambda: nn.BatchNorm2d(4), lambda: nn.BatchNorm3d(4),
    lambda: nn.BatchNorm1d(4, affine=False), lambda: nn.BatchNorm2d(4, track_running_stats=False),
    lambda: nn.LayerNorm(4), lambda: nn.LayerNorm((4, 6)), lambda: nn.LayerNorm(8),
    lambda: nn.LayerNorm(6, elementwise_affine=False), lambda: nn.LayerNorm(6, bias=False),
    lambda: nn.LayerNorm((4, 6, 8)),
]  # fmt: skip
LINEARS: list[Any] = [
    lambda: nn.Linear(4, 3), lambda: nn.Linear(6, 1), lambda: nn.Linear(8, 4, bias=False), lambda: nn.Linear(1, 2),
]  # fmt: skip
CONVOLUTIONS: list[Any] = [
    *[lambda kind=kind, options=options: kind(4, 8, **options) for kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d)
      for options in (
          {"kernel_size": 1}, {"kernel_size": 3, "padding": 1}, {"kernel_size": 3, "stride": 2},
          {"kernel_size": 3, "dilation": 2}, {"kernel_size": 3, "padding": "same"},
          {"kernel_size": 3, "padding": "same", "dilation": 2}, {"kernel_size": 2, "padding": "same"},
          {"kernel_size": 3, "padding": "valid", "stride": 2}, {"kernel_size": 5, "groups": 2, "bias": False},
          {"kernel_size": 3, "padding": 1, "padding_mode": "reflect"},
          {"kernel_size": 3, "padding": 2, "padding_mode": "circular", "stride": 2},
      )],
    lambda: nn.Conv2d(4, 4, (3, 1), stride=(1, 2), padding=(2, 0), dilation=(2, 1)), lambda: nn.Conv2d(1, 2, 3),
]  # fmt: skip
POOLS: list[Any] = [
    *[lambda kind=kind, options=options: kind(**options) for kind in (nn.MaxPool2d, nn.AvgPool2d) for options in (
        {"kernel_size": 2}, {"kernel_size": 3, "stride": 2, "padding": 1}, {"kernel_size": (3, 2), "stride": (1, 2)},
        {"kernel_size": 2, "ceil_mode": True}, {"kernel_size": 2, "stride": 1}, {"kernel_size": 1},
        {"kernel_size": (4, 1), "padding": (2, 0)},
    )],
    lambda: nn.MaxPool2d(2, dilation=2), lambda: nn.MaxPool2d(2, return_indices=True),
    lambda: nn.MaxPool2d(3, stride=2, padding=1, dilation=(1, 2)), lambda: nn.AvgPool2d(2, count_include_pad=False),
    *[lambda size=size: nn.AdaptiveAvgPool2d(size) for size in (1, 3, (2, 5), (None, 2), (2, None), (1, 1))],
]  # fmt: skip


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("makers", [ELEMENTWISE, NORMS, LINEARS, CONVOLUTIONS, POOLS],
                         ids=["elementwise", "norms", "linears", "convolutions", "pools"])  # fmt: skip
def test_rule_says_what_the_module_gives(makers: list[Any], training: bool) -> None:
    answers = 0
    for make in makers:
        of_this = 0
        for dtype in DTYPES:
            module = make().train(training)
            for weights in {torch.float32, dtype if dtype.is_floating_point else torch.float32}:
                module = module.to(weights)
                for shape in SHAPES:
                    for x in forms(shape, dtype):
                        of_this += check(module, (x,))
        answers += of_this
        print(make(), of_this)
