"""Arguments by name, against Python's own binding and the signatures of torch."""

from __future__ import annotations

import numbers
import operator
from typing import Any, Union

import pytest
import torch
from torch import nn
from torch.nn import functional

import featx
from featx.errors import PassError, TargetError, TraceError
from featx.ir.schemas import (
    check_for_mutable_operation,
    get_signature_for_torch_op,
    normalize_function,
    normalize_module,
    type_matches,
)

X = torch.ones(2)


def test_overloads_that_do_not_differ_for_these_arguments_are_not_ambiguous() -> None:
    # One takes names of dimensions.
    pair = normalize_function(torch.sum, (X, [0]), {"keepdim": True})
    assert pair == ((X, [0]), {"keepdim": True, "dtype": None})


def test_overloads_that_differ_need_types() -> None:
    for target, args in ((torch.std, (X, True)), (torch.conv2d, (X, X))):  # other names; other defaults
        with pytest.raises(
            PassError, match=rf"torch\.{target.__name__} has several overloads that fit; give arg_types"
        ):
            normalize_function(target, args)
    assert normalize_function(torch.std, (X, True), arg_types=(torch.Tensor, bool)) == ((X, True), {})
    types = {"padding": str}
    pair = normalize_function(torch.conv2d, (X, X), {"padding": "same"}, (torch.Tensor, torch.Tensor), types, True)
    assert pair is not None
    assert list(pair.kwargs) == ["input", "weight", "bias", "stride", "padding", "dilation", "groups"]


def test_call_without_a_known_signature_gives_none() -> None:
    def anything(*args: Any) -> None: ...

    assert normalize_function(anything, (X,)) is None
    assert normalize_function(len, (X,)) is None
    assert normalize_function(torch.relu, (X, X, X)) is None


def test_module_of_another_class_gives_none_and_a_missing_one_raises() -> None:
    class Own(nn.Linear):
        pass

    root = nn.Sequential(Own(2, 2), nn.Bilinear(2, 2, 2))
    assert normalize_module(root, "0", (X,)) is None
    assert normalize_module(root, "1", (X,), {"input2": X}) == ((X,), {"input2": X})
    with pytest.raises(TargetError, match="Sequential has no submodule '7'"):
        normalize_module(root, "7", (X,))


def test_arguments_of_a_node() -> None:
    graph = featx.Graph()
    x = graph.placeholder("x")
    pool = graph.call_function(functional.max_pool2d, (x, 2), {"padding": 1})
    pair = pool.normalized_arguments(nn.Module(), normalize_to_only_use_kwargs=True)
    assert pair is not None
    assert (pair.args, pair.kwargs["input"], pair.kwargs["kernel_size"], pair.kwargs["ceil_mode"]) == ((), x, 2, False)
    assert x.normalized_arguments(nn.Module()) is None
    assert graph.call_function(operator.add, (x, x)).normalized_arguments(nn.Module()) is None


def test_operation_that_writes_is_refused() -> None:
    check_for_mutable_operation(torch.relu, (X,), {})
    for target in (torch.relu_, torch.ops.aten.add_.Tensor):
        with pytest.raises(TraceError, match="writes one of its arguments"):
            check_for_mutable_operation(target, (X, X) if target is not torch.relu_ else (X,), {})


def test_signatures_of_operators() -> None:
    [signature] = get_signature_for_torch_op(torch.ops.aten.softmax.int)
    assert str(signature).startswith("(input: torch.Tensor, dim: int, dtype: ")
    signatures, schemas = get_signature_for_torch_op(torch.add, return_schemas=True)
    assert len(signatures) == len(schemas) > 3
    assert get_signature_for_torch_op(print) is None
    # `from` is no name that Python takes; such an argument is given by position.
    assert normalize_function(torch.ops.aten.uniform_.default, (X,)) is None


@pytest.mark.parametrize(
    ("wanted", "given", "expected"),
    [
        (Any, str, True),
        (int, bool, True),
        (int, float, False),
        (int, torch.dtype, True),
        (numbers.Number, float, True),
        (numbers.Number, torch.Tensor, False),
        (int | None, int, True),
        (int | None, type(None), True),
        (Union[int, str], float, False),  # noqa: UP007 - the older form of it
        (int | str, float, False),
        (list[int], list[int], True),
        (list[int], tuple[int, int], True),
        (list[int], tuple[int, ...], True),
        (list[int], int, True),
        (list[int], list[float], False),
        (list[torch.Tensor], torch.Tensor, False),
        (list[torch.Tensor], list[nn.Parameter], True),
    ],
)
def test_types_that_can_be_passed(wanted: Any, given: Any, expected: bool) -> None:
    assert type_matches(wanted, given) is expected
