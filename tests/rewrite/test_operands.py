"""Arguments are lined up as Python and torch bind them, and constants compared to the last bit."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional

import featx
from featx.ir.equality import is_same
from featx.ir.node import Node
from featx.rewrite.operands import is_commutative, operand_pairs


def call(target: Any, *args: Any, op: str = "call_function", **kwargs: Any) -> Node:
    return featx.Graph().create_node(op, target, args, kwargs)


def decorated(first: int, *others: int, scale: float = 1.0) -> None: ...


ALIKE: list[tuple[Node, Node]] = [
    (call(functional.gelu, 1), call(functional.relu, 1)),  # what is called is not compared here
    (call(functional.softmax, 1, 2), call(functional.softmax, 1, dim=2)),
    (call(functional.softmax, 1), call(functional.softmax, input=1, dtype=None)),
    (call(torch.flatten, 1, 2), call(torch.flatten, 1, start_dim=2)),
    (call(torch.flatten, 1, 2), call(torch.flatten, input=1, start_dim=2)),
    (call(torch.sum, 1, 2), call(torch.sum, 1, dim=2)),
    (call("sum", 1, 2, op="call_method"), call("sum", 1, dim=2, op="call_method")),
    (call(torch.ops.aten.sum.dim_IntList, 1, [2]), call(torch.ops.aten.sum.dim_IntList, 1, dim=[2])),
    (call(torch.ops.aten.sum.dim_IntList, 1, [2]), call(torch.ops.aten.sum.dim_IntList, 1, [2], False, dtype=None)),
    (call(decorated, 1, 2, 3), call(decorated, 1, 2, 3, scale=1.0)),
]


@pytest.mark.parametrize(("one", "other"), ALIKE)
def test_calls_with_the_same_arguments_line_up(one: Node, other: Node) -> None:
    for wanted, found in ((one, other), (other, one)):
        pairs = operand_pairs(wanted, found, None)
        assert pairs is not None
        assert all(is_same(*pair) for pair in pairs)


DIFFERENT: list[tuple[Node, Node]] = [
    (call(functional.softmax, 1, 2), call(functional.softmax, 1)),
    (call(functional.softmax, 1, 2), call(functional.softmax, 1, dim=3)),
    (call(torch.flatten, 1, 2), call(torch.flatten, 1, end_dim=2)),
    (call(torch.flatten, 1), call(torch.flatten, 1, 1)),
    (call(torch.flatten, 1), call(torch.flatten, 1, nonsense=1)),
    (call(torch.ops.aten.sum.dim_IntList, 1, [2]), call(torch.ops.aten.sum.dim_IntList, 1, [2], True)),
    (call(decorated, 1, 2), call(decorated, 1, 2, 3)),
    (call(operator.add, 1, 2), call(operator.add, 1)),
    (call("view", 1, 2, 3, op="call_method"), call("view", 1, (2, 3), op="call_method")),
]


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_calls_with_other_arguments_do_not(one: Node, other: Node) -> None:
    for wanted, found in ((one, other), (other, one)):
        pairs = operand_pairs(wanted, found, None)
        assert pairs is None or not all(is_same(*pair) for pair in pairs)


def test_arguments_of_modules_line_up_by_the_signature_of_forward() -> None:
    owner = nn.Sequential(nn.Linear(2, 2))
    one, other = call("0", 1, op="call_module"), call("0", input=1, op="call_module")
    assert operand_pairs(one, other, owner) == [(1, 1)]
    assert operand_pairs(one, other, None) is None


NAN = float("nan")


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (1, 1, True),
        (1, True, False),
        (1, 1.0, False),
        (0.0, -0.0, False),
        (NAN, float("nan"), True),
        (complex(0, -0.0), complex(0, 0.0), False),
        (torch.float16, torch.float16, True),
        (slice(1, None), slice(1, None), True),
        (slice(1, None), slice(None, 1), False),
        ([1, (2, 3)], [1, (2, 3)], True),
        ({"a": 1}, {"a": 2}, False),
        (torch.ones(2), torch.ones(2), True),
        (torch.ones(2), torch.ones(2, 1), False),
        (torch.ones(2), torch.ones(2, dtype=torch.int64), False),
        (torch.ones(2, device="meta"), torch.ones(2, device="meta"), False),
        (numpy.ones(2), numpy.ones(2), False),
    ],
)
def test_values_are_the_same_only_to_the_last_bit(one: Any, other: Any, same: bool) -> None:
    assert is_same(one, other) is same


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        (call(torch.add, 1, 2), True),
        (call(torch.add, 1, 2, alpha=3), False),
        (call(torch.sub, 1, 2), False),
        (call(operator.mul, 1, 2), True),
        (call(operator.iadd, 1, 2), False),
        (call(operator.or_, 1, 2), True),
        (call(torch.maximum, 1, 2), True),
        (call(torch.ops.aten.mul.Tensor, 1, 2), True),
        (call(torch.ops.aten.div.Tensor, 1, 2), False),
        (call("add", 1, 2, op="call_method"), True),
        (call("__add__", 1, 2, op="call_method"), True),
        (call("add_", 1, 2, op="call_method"), False),
        (call("add", 1, 2, op="call_module"), False),
        (call(decorated, 1, 2), False),
    ],
)
def test_operands_that_may_be_exchanged(node: Node, expected: bool) -> None:
    assert is_commutative(node) is expected


def test_function_of_the_user_called_add_is_not_commutative() -> None:
    def add(one: Any, other: Any) -> Any:
        return one - other

    functions: list[Callable[..., Any]] = [add]
    assert not any(is_commutative(call(function, 1, 2)) for function in functions)
