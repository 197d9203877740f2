"""output_of: what a rule says of a module is what the real module gives on the CPU."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from layouts import form, forms, on_meta
from torch import nn

import featx
from featx.tracing.stand_ins.module_shapes import output_of

FLOATING = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
SHAPES: tuple[tuple[int, ...], ...] = (
    (), (4,), (2, 4), (1, 4), (2, 4, 6), (2, 4, 1), (0, 4, 6), (2, 4, 6, 8), (1, 4, 7, 5), (2, 4, 1, 1), (2, 1, 4, 4),
    (2, 4, 5, 6, 7), (1, 4, 8, 8, 8),
)  # fmt: skip


def is_in_place(result: torch.Tensor, x: torch.Tensor) -> bool:
    """Say whether the result is the argument itself, or lies where the argument does."""
    return result.numel() > 0 and (result is x or (not x.is_meta and result.data_ptr() == x.data_ptr()))


def check(module: nn.Module, x: torch.Tensor) -> bool:
    """Compare the rule with the module, where that takes `x`; return whether there is an answer."""
    twin = on_meta(x)
    answer = output_of(module, (twin,), {})
    if answer is None:
        return False
    try:
        with torch.no_grad():
            result = module(x)
    except (RuntimeError, NotImplementedError, ValueError, IndexError):
        return False
    assert answer.is_meta
    assert form(answer) == form(result), f"{module} on {form(x)}"
    assert is_in_place(answer, twin) == is_in_place(result, x), f"{module} on {form(x)}"
    return True


INPLACE = (nn.ReLU, nn.ReLU6, nn.SiLU, nn.Hardswish, nn.Hardsigmoid, nn.ELU, nn.LeakyReLU)
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
PLAIN = tuple(torch.randn(shape) for shape in SHAPES) + (
    torch.randn(2, 1, 9, 9),
    torch.randn(2, 4, 9),
    torch.randn(1, 4, 9, 9, 9),
)
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
        {"kernel_size": 2, "stride": 1}, {"kernel_size": 1},
        {"kernel_size": (4, 1), "padding": (2, 0)},
    )],
    lambda: nn.MaxPool2d(2, dilation=2),
    lambda: nn.MaxPool2d(3, stride=2, padding=1, dilation=(1, 2)), lambda: nn.AvgPool2d(2, count_include_pad=False),
    *[lambda size=size: nn.AdaptiveAvgPool2d(size) for size in (1, 3, (2, 5), (1, 1))],
]  # fmt: skip


EVERY = {"elementwise": ELEMENTWISE, "norms": NORMS, "linears": LINEARS, "convolutions": CONVOLUTIONS, "pools": POOLS}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:dropout[23]d. Received", "ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("kind", list(EVERY))
def test_rule_says_what_the_module_gives(kind: str, training: bool) -> None:
    for make in EVERY[kind]:
        for dtype in (*FLOATING, torch.int64) if kind == "elementwise" else (torch.float32, torch.float64):
            for weights in {torch.float32, dtype} - {torch.int64}:
                module = make().train(training).to(weights)
                for shape in SHAPES:
                    for x in forms(shape, dtype):
                        check(module, x)


@pytest.mark.filterwarnings("ignore:dropout[23]d. Received", "ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("kind", list(EVERY))
def test_rule_answers_for_a_plain_input(kind: str) -> None:
    for module in [make() for make in EVERY[kind]]:
        if isinstance(module, (nn.PReLU, nn.AlphaDropout)) or getattr(module, "padding_mode", "zeros") != "zeros":
            continue  # not plain
        assert sum(check(module, x) for x in PLAIN), module


@pytest.mark.parametrize(
    "module",
    [nn.MaxPool2d(2, ceil_mode=True), nn.MaxPool2d(2, return_indices=True), nn.AdaptiveAvgPool2d((None, 2))],
)
def test_uncommon_option_of_a_pool_is_left_to_torch(module: nn.Module) -> None:
    assert output_of(module, (torch.ones(1, 2, 8, 8, device="meta"),), {}) is None


@pytest.mark.parametrize("module", [nn.ReLU(inplace=True), nn.Dropout(0.5, inplace=True), nn.SiLU(inplace=True)])
def test_version_of_what_is_written_in_place_goes_up_as_in_torch(module: nn.Module) -> None:
    x = torch.ones(2, 3)
    twin, before = on_meta(x), on_meta(x)._version
    output_of(module.train(), (twin,), {})
    real = x._version
    module(x)
    assert (twin._version > before) == (x._version > real)


@pytest.mark.parametrize(
    "module", [nn.Conv2d(4, 6, 3), nn.Conv2d(4, 6, 1), nn.BatchNorm2d(4), nn.Identity(), nn.ReLU(), nn.GELU()]
)
def test_rule_keeps_channels_last_where_the_module_does(module: nn.Module) -> None:
    assert check(module, torch.randn(2, 4, 7, 5).contiguous(memory_format=torch.channels_last))


@pytest.mark.parametrize("x", [torch.ones(3, 4).t(), torch.ones(1, 4).expand(3, 4), torch.ones(3, 8)[:, ::2]])
def test_rule_leaves_what_is_not_contiguous_to_torch(x: torch.Tensor) -> None:
    assert output_of(nn.ReLU(), (on_meta(x),), {}) is None


def test_rule_leaves_real_tensors_subclasses_and_keywords_to_torch() -> None:
    assert output_of(nn.ReLU(), (torch.ones(2, 3),), {}) is None
    assert output_of(nn.ReLU(), (nn.Parameter(torch.ones(2, 3, device="meta")),), {}) is None
    assert output_of(nn.ReLU(), (), {"input": torch.ones(2, 3, device="meta")}) is None


def test_subclass_of_a_module_has_no_rule() -> None:
    class Doubled(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return torch.cat([super().forward(input)] * 2, -1)

    assert output_of(Doubled(4, 3), (torch.ones(2, 4, device="meta"),), {}) is None


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.Linear(4, 3), (2, 5)), (nn.Conv2d(4, 3, 3), (1, 4, 2, 2)), (nn.Conv2d(4, 3, 1), (1, 5, 2, 2)),
        (nn.BatchNorm2d(4), (1, 5, 2, 2)), (nn.LayerNorm((3, 4)), (2, 4, 3)), (nn.MaxPool2d(3), (1, 1, 2, 2)),
        (nn.BatchNorm1d(4).train(), (1, 4)), (nn.Linear(4, 3, dtype=torch.float64), (2, 4)),
        (nn.MaxPool2d(2, 1, 2), (1, 1, 4, 4)),
    ],
)  # fmt: skip
def test_what_the_module_refuses_is_left_to_torch(module: nn.Module, shape: tuple[int, ...]) -> None:
    with pytest.raises((RuntimeError, ValueError)):
        module(torch.ones(shape))
    assert output_of(module, (torch.ones(shape, device="meta"),), {}) is None


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("options", [{}, {"need_weights": True}, {"need_weights": False}], ids=str)
@pytest.mark.parametrize("widths", [{}, {"kdim": 6, "vdim": 5}, {"bias": False}, {"add_zero_attn": False}], ids=str)
def test_attention_gives_what_the_rule_says(
    widths: dict[str, Any], options: dict[str, Any], training: bool, batch_first: bool
) -> None:
    module = nn.MultiheadAttention(4, 2, batch_first=batch_first, dropout=0.1, **widths).train(training)
    for batch, length in ((2, 3), (1, 1), (3, 5)):
        query = torch.randn(batch, length, 4)
        other = torch.randn(batch, length if not batch_first else 7, module.kdim)
        values = torch.randn(batch, other.shape[1], module.vdim)
        # With gradients: without, eval mode takes another way, whose result lies otherwise in memory.
        args = (query, other, values)
        answer = output_of(module, tuple(on_meta(x) for x in args), options)
        assert (answer is not None) == batch_first
        if answer is not None:
            assert form(answer) == form(module(*args, **options))


@pytest.mark.parametrize("options", [{}, {"need_weights": False}], ids=str)
@pytest.mark.parametrize("lay", [lambda x: x.mT.contiguous().mT, lambda x: x.repeat_interleave(2, 1)[:, ::2]])
def test_attention_to_positions_that_lie_apart_in_memory(
    lay: Callable[[torch.Tensor], torch.Tensor], options: dict[str, Any]
) -> None:
    module = nn.MultiheadAttention(4, 2, batch_first=True)
    for args in ([lay(torch.randn(2, 5, 4))] * 3, [lay(torch.randn(2, length, 4)) for length in (5, 7, 7)]):
        answer = output_of(module, tuple(on_meta(x) for x in args), options)
        assert answer is not None
        assert form(answer) == form(module(*args, **options))


@pytest.mark.parametrize("kind", ["add_zero_attn", "add_bias_kv"])
def test_weights_of_an_attention_that_adds_positions_have_their_shape(kind: str) -> None:
    model = nn.MultiheadAttention(4, 2, batch_first=True, **{kind: True})  # pyright: ignore[reportArgumentType]
    x = torch.ones(2, 3, 4)
    assert model(x, x, x)[1].shape == (2, 3, 4)
    assert output_of(model, tuple(on_meta(x) for _ in range(3)), {}) is None


@pytest.mark.parametrize("options", [{"average_attn_weights": False}, {"attn_mask": torch.zeros(3, 3, device="meta")}])
def test_attention_with_other_options_is_left_to_torch(options: dict[str, Any]) -> None:
    x = torch.ones(2, 3, 4, device="meta")
    assert output_of(nn.MultiheadAttention(4, 2, batch_first=True), (x, x, x), options) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell])
def test_rule_of_a_recurrent_cell(kind: type[nn.Module], bias: bool, dtype: torch.dtype) -> None:
    cell: Any = kind(4, 6, bias=bias)
    cell.to(dtype)
    inputs = [torch.randn(2, 4), torch.randn(1, 4), torch.randn(2, 3, 4)[:, 1], torch.randn(4, 2).t(), torch.randn(4)]
    answers = 0
    for x, rows in ((x.to(dtype), x.shape[0] if x.dim() == 2 else 2) for x in inputs):
        step = torch.randn(rows, 6).to(dtype)
        pairs = (None, (step, step), (step, step.t().contiguous().t()), step, [step, step])
        for state in pairs if kind is nn.LSTMCell else (None, step, step.t().contiguous().t(), step.float()):
            args = (x,) if state is None else (x, state)
            answer = output_of(cell, on_meta(args), {})
            if answer is not None:
                with torch.no_grad():
                    result = cell(*args)
                assert tuple(map(form, answer if kind is nn.LSTMCell else [answer])) == tuple(
                    map(form, result if kind is nn.LSTMCell else [result])
                )
                answers += 1
    assert answers >= 6


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell])
def test_recurrent_cell_says_what_it_refuses(kind: type[nn.Module]) -> None:
    cell: Any = kind(4, 6)
    for x in (torch.ones(2, 5), torch.ones(2, 4, dtype=torch.float64), torch.ones(2, 2, 4)):
        assert output_of(cell, (on_meta(x),), {}) is None
    other = torch.ones(3, 6)
    assert output_of(cell, on_meta((torch.ones(2, 4), (other, other) if kind is nn.LSTMCell else other)), {}) is None


class AttendsToPixels(nn.Module):
    """Attends to the positions of a map, whose channels lie first in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.attention = nn.Conv2d(3, 8, 3), nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.stem(x).flatten(2).transpose(1, 2)
        return tokens + self.attention(tokens, tokens, tokens, need_weights=False)[0]


def test_attention_to_pixels_needs_no_values(caplog: pytest.LogCaptureFixture) -> None:
    model = AttendsToPixels().eval()
    with caplog.at_level(logging.DEBUG, logger="featx"):
        extractor = featx.create_feature_extractor(model, ["output"], example_inputs=torch.rand(2, 3, 9, 9))
    assert not [record for record in caplog.records if ", with values" in record.getMessage()]
    x = torch.rand(3, 3, 7, 12)
    torch.testing.assert_close(extractor(x)["output"], model(x), rtol=0, atol=0)
