"""result_of: what a rule says of a torch function is what the function gives on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from layouts import form, forms, on_meta
from torch.nn import functional

from featx.tracing.stand_ins.function_shapes import result_of

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64)
SHAPES: tuple[tuple[int, ...], ...] = (
    (), (4,), (1, 4), (2, 4), (2, 4, 6), (0, 4, 6), (2, 4, 1), (2, 4, 6, 8), (2, 4, 1, 1),
)  # fmt: skip
BROADCAST: tuple[tuple[int, ...], ...] = (
    (), (1,), (4,), (6,), (8,), (1, 1), (2, 1), (4, 1, 1), (2, 4, 1), (1, 2, 4), (0,), (1, 4, 1, 1), (5, 1, 1, 1, 1),
)  # fmt: skip
METHODS = torch.Tensor


def every_input(dtypes: tuple[torch.dtype, ...] = DTYPES) -> Iterator[torch.Tensor]:
    for dtype in dtypes:
        for shape in SHAPES:
            yield from forms(shape, dtype)


def check(function: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
    """Compare the rule with the function, where that takes the arguments; return whether there is an answer."""
    twins = tuple(on_meta(value) for value in args)
    answer = result_of(function, twins, {key: on_meta(value) for key, value in kwargs.items()})
    if answer is None:
        return False
    try:
        result = function(*args, **kwargs)
    except (RuntimeError, NotImplementedError, TypeError, IndexError):
        return False
    if result is NotImplemented:
        return False
    assert answer.is_meta
    assert form(answer) == form(result), f"{function} {args} {kwargs}"
    assert (answer is twins[0]) == (result is args[0]), f"{function} {args} {kwargs}"
    return True


ONE_TO_ONE: list[Any] = [
    functional.gelu, functional.relu, torch.relu, METHODS.relu, functional.silu, torch.sigmoid, METHODS.sigmoid,
    functional.sigmoid, torch.tanh, METHODS.tanh, torch.exp, torch.sqrt, METHODS.sqrt, torch.rsqrt, torch.neg,
    torch.abs, METHODS.abs, torch.erf, functional.hardswish, functional.hardsigmoid, functional.leaky_relu,
    functional.elu, functional.softplus, functional.mish, functional.relu6,
]  # fmt: skip
ARITHMETIC: list[Any] = [
    torch.add, torch.sub, torch.mul, torch.div, torch.maximum, torch.minimum, METHODS.add, METHODS.mul, METHODS.sub,
    METHODS.div, METHODS.maximum, METHODS.__rsub__,
]  # fmt: skip
COMPARISONS: list[Any] = [
    torch.gt, torch.lt, torch.ge, torch.le, torch.eq, torch.ne, METHODS.gt, METHODS.__eq__, METHODS.__ne__,
]  # fmt: skip


@pytest.mark.parametrize("function", ONE_TO_ONE, ids=lambda function: function.__name__)
def test_function_of_one_tensor_gives_what_the_rule_says(function: Callable[..., Any]) -> None:
    for x in every_input():
        for kwargs in ({}, {"inplace": True}, {"inplace": False}):
            check(function, x, **kwargs)
    assert check(function, torch.ones(2, 3))
    assert check(function, torch.ones(2, 3, 4).transpose(0, 2))


@pytest.mark.parametrize("function", ONE_TO_ONE, ids=lambda function: function.__name__)
def test_integer_that_may_become_a_float_is_left_to_torch(function: Callable[..., Any]) -> None:
    assert result_of(function, (torch.ones(2, dtype=torch.int64, device="meta"),), {}) is None


@pytest.mark.parametrize("name", ["relu", "silu", "leaky_relu", "elu", "hardswish", "hardsigmoid", "relu6", "mish"])
def test_call_that_writes_in_place_is_left_to_torch(name: str) -> None:
    x = torch.ones(2, 3, device="meta")
    assert result_of(getattr(functional, name), (x,), {"inplace": True}) is None


def test_flag_by_position_that_writes_in_place_is_left_to_torch() -> None:
    x = torch.ones(2, 3, device="meta")
    assert result_of(functional.relu, (x, True), {}) is None
    assert result_of(functional.leaky_relu, (x, 0.1, True), {}) is None
    assert result_of(functional.dropout, (x, 0.5, True, True), {}) is None


@pytest.mark.parametrize("function", [torch.softmax, functional.softmax, METHODS.softmax, torch.log_softmax])
def test_softmax_gives_what_the_rule_says(function: Callable[..., Any]) -> None:
    for x in [x for x in every_input() if x.is_contiguous()]:
        for dim in (0, -1):
            check(function, x, dim)
            check(function, x, dim=dim)
            check(function, x, dim=dim, dtype=torch.float64)
            check(function, x, dim, torch.float64)
            check(function, x, dim, 3, torch.float64)
    assert check(function, torch.ones(2, 3), -1)


@pytest.mark.parametrize("function", [torch.roll, METHODS.roll])
def test_roll_gives_what_the_rule_says(function: Callable[..., Any]) -> None:
    for x in [x for x in every_input() if x.dim() < 4 or x.is_contiguous()]:
        check(function, x, 1)
        check(function, x, 1, 0)
        check(function, x, (1, 2), dims=(0, -1))
    assert check(function, torch.ones(2, 3), 1, 0)


@pytest.mark.slow
@pytest.mark.parametrize("function", ARITHMETIC + COMPARISONS, ids=lambda function: function.__qualname__)
def test_function_of_two_operands_gives_what_the_rule_says(function: Callable[..., Any]) -> None:
    for x in every_input((torch.float32, torch.float16, torch.int64)):
        for other in (2, 2.5, True, 1j, x.to(torch.float64), *forms(tuple(x.shape), x.dtype)):
            check(function, x, other)
            check(function, other, x)
        for shape in BROADCAST:
            other = torch.ones(shape, dtype=x.dtype)
            check(function, x, other)
            check(function, other, x)
    assert check(function, torch.ones(2, 3), torch.ones(3))
    assert check(function, torch.ones(3), torch.ones(2, 3))


@pytest.mark.parametrize("function", ARITHMETIC, ids=lambda function: function.__qualname__)
def test_operands_of_two_dtypes_or_that_do_not_fit_are_left_to_torch(function: Callable[..., Any]) -> None:
    x = torch.ones(2, 3, device="meta")
    assert result_of(function, (x, torch.ones(2, 3, device="meta", dtype=torch.float64)), {}) is None
    assert result_of(function, (x, torch.ones(2, device="meta")), {}) is None
    assert result_of(function, (torch.ones(2, 1, device="meta"), torch.ones(1, 3, device="meta")), {}) is None
    assert result_of(function, (x, x), {"out": x}) is None


@pytest.mark.parametrize("function", [torch.layer_norm, functional.layer_norm])
def test_layer_norm_gives_what_the_rule_says(function: Callable[..., Any]) -> None:
    for x in every_input((torch.float32, torch.bfloat16, torch.int64)):
        for shape in ((4,), (6,), [6, 8], torch.Size([4, 6]), (1,)):
            weight = torch.ones(tuple(shape)).to(x.dtype)
            for weights in ((), (weight,), (weight, weight), (None, weight), (weight.double(), weight.double())):
                check(function, x, shape, *weights)
    assert check(function, torch.ones(2, 4), (4,), torch.ones(4), torch.ones(4))
    assert check(functional.layer_norm, torch.ones(2, 4), normalized_shape=(4,), weight=torch.ones(4), eps=1e-3)


def test_linear_gives_what_the_rule_says() -> None:
    for x in every_input():
        for rows, columns in ((3, 4), (1, 6), (5, 8), (2, 1)):
            weight, bias = torch.ones(rows, columns).to(x.dtype), torch.ones(rows).to(x.dtype)
            check(functional.linear, x, weight)
            check(functional.linear, x, weight, bias)
            check(functional.linear, x, weight, bias=None)
            check(functional.linear, x, weight=weight, bias=bias)
            check(functional.linear, x, weight.t().contiguous().t(), bias)
    assert check(functional.linear, torch.ones(2, 4), torch.ones(3, 4), torch.ones(3))
    assert check(functional.linear, torch.ones(4), torch.ones(3, 4))


@pytest.mark.parametrize(("weight", "bias"), [((3, 5), (3,)), ((3, 4), (4,)), ((4,), None)])
def test_linear_that_torch_refuses_or_that_is_no_matrix_is_left_to_torch(weight: Any, bias: Any) -> None:
    values = [torch.ones(shape, device="meta") if shape else None for shape in ((2, 4), weight, bias)]
    assert result_of(functional.linear, tuple(values), {}) is None


@pytest.mark.parametrize("function", [torch.clamp, METHODS.clamp])
def test_clamp_gives_what_the_rule_says(function: Callable[..., Any]) -> None:
    for x in every_input():
        for bounds in ((0,), (0, 1), (None, 1.5), (x,), (0, x), ()):
            check(function, x, *bounds)
        check(function, x, min=0.5)
        check(function, x, min=0, max=x)
    assert check(function, torch.ones(2, 3).t(), 0, max=1)


def test_normalize_gives_what_the_rule_says() -> None:
    for x in every_input():
        check(functional.normalize, x)
        check(functional.normalize, x, 1.0, -1)
        check(functional.normalize, x, dim=0, eps=1e-3)
        check(functional.normalize, x, out=torch.ones_like(x))
    assert check(functional.normalize, torch.ones(2, 3), dim=-1, out=None)  # as torch hands it on
    assert check(functional.normalize, torch.ones(2, 3, 4).permute(1, 0, 2), 2.0, -1, 1e-12)


@pytest.mark.parametrize("function", [torch.masked_fill, METHODS.masked_fill])
def test_masked_fill_gives_what_the_rule_says(function: Callable[..., Any]) -> None:
    for x in every_input():
        for mask in (x > 0, *[torch.ones(shape, dtype=torch.bool) for shape in BROADCAST]):
            check(function, x, mask, 0.5)
            check(function, x, mask, value=1)
        check(function, x, torch.ones_like(x), 0)
    assert check(function, torch.ones(2, 3), torch.ones(3, dtype=torch.bool), 0)


@pytest.mark.parametrize("function", [torch.matmul, METHODS.matmul, METHODS.__matmul__])
def test_matmul_gives_what_the_rule_says(function: Callable[..., Any]) -> None:
    for x in every_input((torch.float32, torch.bfloat16)):
        for y in (x, x.transpose(-1, -2) if x.dim() > 1 else x, torch.ones(x.shape[-1:] + (3,)).to(x.dtype)):
            check(function, x, y)
            check(function, y, x)
    assert check(function, torch.ones(2, 3, 4), torch.ones(2, 5, 4).transpose(1, 2))
    assert check(function, torch.ones(2, 2, 3, 4), torch.ones(2, 2, 4, 1))


@pytest.mark.parametrize(
    "shape", [(-1,), (2, -1), (-1, 4), (2, 4), (4, 2), (2, 24), (8, 6), (2, 2, -1), (-1, -1), (2, -1, 0), (5, -1), ()]
)
def test_reshape_gives_what_the_rule_says_and_shares_memory_where_torch_does(shape: tuple[int, ...]) -> None:
    for x in every_input():
        for call in (METHODS.reshape, torch.reshape):
            if check(call, x, shape):
                answer = result_of(call, (on_meta(x), shape), {})
                assert answer is not None
                assert answer._is_view() == (call(x, shape).data_ptr() == x.data_ptr())
        check(METHODS.reshape, x, *shape)
    assert shape in ((-1, -1), (2, -1, 0), (5, -1), (), (2, 4), (4, 2)) or check(
        METHODS.reshape, torch.ones(6, 4, 2).permute(2, 1, 0), shape
    )


@pytest.mark.parametrize("dim", [0, 1, -1, -2, 3, 9, -9])
def test_cat_gives_what_the_rule_says(dim: int) -> None:
    for x in every_input():
        for y in forms(tuple(x.shape), x.dtype):
            check(torch.cat, [x, y], dim)
            check(torch.cat, (x, y, x), dim=dim)
            check(torch.cat, (x, y), axis=dim)
        check(torch.cat, [x], dim)
        check(torch.cat, [x, torch.ones(0, dtype=x.dtype)], dim)
        check(torch.cat, [x, x[:1] if x.dim() else x], dim)
        check(torch.cat, [x, x.double()], dim)


def test_cat_answers_in_the_plain_case_and_for_pieces_of_several_lengths() -> None:
    assert check(torch.cat, [torch.ones(2, 3), torch.ones(2, 3)])
    assert check(torch.cat, [torch.ones(2, 3), torch.ones(2, 5)], -1)


def test_cat_that_torch_refuses_is_left_to_torch() -> None:
    x, y = torch.ones(2, 3, device="meta"), torch.ones(4, 5, device="meta")
    assert result_of(torch.cat, ([x, y],), {}) is None
    assert result_of(torch.cat, ([],), {}) is None
    assert result_of(torch.cat, ([x, x], 2), {}) is None


@pytest.mark.parametrize("probability", [0, 0.0, 0.5, 1, 1.0])
@pytest.mark.parametrize("training", [False, True])
def test_dropout_gives_what_the_rule_says(training: bool, probability: float) -> None:
    for x in every_input():
        for inplace in (False, True):
            check(functional.dropout, x, probability, training, inplace)
            check(functional.dropout, x, p=probability, training=training, inplace=inplace)
    assert check(functional.dropout, torch.ones(2, 3), probability, training)


def test_dropout_with_an_impossible_probability_is_left_to_torch() -> None:
    assert result_of(functional.dropout, (torch.ones(2, device="meta"), 1.5), {}) is None


def test_tensors_of_other_classes_and_layouts_are_left_to_torch() -> None:
    class Mine(torch.Tensor):
        pass

    x = torch.ones(2, 3)
    assert result_of(torch.relu, (x.as_subclass(Mine),), {}) is None
    assert result_of(torch.relu, (x.to_sparse(),), {}) is None


def test_parameter_counts_as_a_tensor() -> None:
    assert check(torch.mul, torch.nn.Parameter(torch.ones(2, 3)), torch.ones(3))


def test_function_without_a_rule_has_no_answer() -> None:
    assert result_of(torch.matmul, (torch.ones(2, 2, device="meta"), torch.ones(2, 2, device="meta")), {}) is None


GRIDS: tuple[tuple[int, ...], ...] = ((2, 3, 5, 2), (1, 3, 5, 2), (2, 3, 5, 3), (2, 3, 4, 5, 3), (2, 0, 5, 2))


@pytest.mark.filterwarnings("ignore:Default grid_sample")
@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
def test_grid_sample_gives_what_the_rule_says(mode: str, padding: str) -> None:
    answers = 0
    for dtype in (torch.float32, torch.float64):
        for shape in ((2, 4, 6, 8), (2, 4, 6, 8, 5), (1, 4, 6, 8), (2, 0, 6, 8)):
            for x in forms(shape, dtype):
                for grid in (torch.rand(size, dtype=dtype) for size in GRIDS):
                    answers += check(functional.grid_sample, x, grid, mode, padding, align_corners=False)
                    answers += check(functional.grid_sample, x, grid, mode=mode, padding_mode=padding)
    assert bool(answers) == (mode != "bicubic")
