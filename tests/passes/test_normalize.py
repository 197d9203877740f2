from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from featx import Graph, GraphModule, symbolic_trace
from featx.ir.effects import Effects, MeasuredEffects
from featx.passes import normalize_arguments
from featx.tracing.guards.guards import check_decision


def normalized(op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], root: Any = None) -> Any:
    """Return the arguments of a call on the input `x` after normalizing, `"x"` for `x`, having compared the values."""
    graph = Graph()
    x = graph.placeholder("x")
    named = {"x": x}
    args = tuple(named.get(value, value) if isinstance(value, str) else value for value in args)
    call = graph.create_node(op, target, args, kwargs)
    graph.output(call)
    gm = GraphModule(root or nn.Module(), graph)
    expected = outcome(gm)
    changed = normalize_arguments(gm)
    graph.lint()
    torch.testing.assert_close(outcome(gm), expected, rtol=0, atol=0, equal_nan=True)
    assert changed is ((call.args, dict(call.kwargs)) != (args, kwargs))
    assert not normalize_arguments(gm)
    return tuple("x" if value is x else value for value in call.args), {
        name: "x" if value is x else value for name, value in call.kwargs.items()
    }


def outcome(gm: GraphModule) -> Any:
    torch.manual_seed(0)
    return gm(torch.arange(4.0) - 1)


FUNCTIONS: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[str]]] = [
    (torch.sum, ("x", 0), {}, ["input", "dim"]),
    (torch.add, ("x", "x"), {"alpha": 2}, ["input", "other", "alpha"]),
    (torch.clamp, ("x", 0), {"max": 1}, ["input", "min", "max"]),
    (torch.where, (torch.tensor([True, False] * 2), "x", 0.0), {}, ["condition", "input", "other"]),
    (torch.ones, ((2, 3),), {}, ["size"]),
    (torch.arange, (1, 3), {}, ["start", "end"]),
    (torch.tensor, (1.5,), {}, ["data"]),  # the schema has "t"
    (torch.unsqueeze, ("x", 0), {}, ["input", "dim"]),
    (torch.split, ("x", 2), {}, ["tensor", "split_size_or_sections"]),
    (functional.softmax, ("x", 0), {}, ["input", "dim"]),
    (functional.pad, ("x", (1, 1)), {}, ["input", "pad"]),
    (functional.gelu, ("x",), {}, ["input"]),
    (functional.relu, ("x", True), {}, ["input", "inplace"]),
    (functional.dropout, ("x", 0.5, True), {}, ["input", "p", "training"]),
    (torch.ops.aten.sum.dim_IntList, ("x", [0]), {}, ["self", "dim"]),
]


@pytest.mark.parametrize(("function", "args", "kwargs", "names"), FUNCTIONS)
def test_function_gets_keywords(function: Any, args: Any, kwargs: Any, names: list[str]) -> None:
    after, keywords = normalized("call_function", function, args, kwargs)
    assert (after, list(keywords)) == ((), names)


METHODS: list[tuple[str, tuple[Any, ...], list[str]]] = [
    ("sum", (0,), ["dim"]), ("sum", ((0,),), ["dim"]), ("mean", (-1, True), ["dim", "keepdim"]),
    ("max", (0,), ["dim"]), ("flatten", (0,), ["start_dim"]), ("transpose", (0, 0), ["dim0", "dim1"]),
    ("chunk", (2, 0), ["chunks", "dim"]), ("masked_fill", (True, 0.0), []), ("view", ([4],), ["size"]),
    ("view", (torch.int32,), ["dtype"]), ("to", (torch.float64,), ["dtype"]),
    ("to", (torch.ones(1),), ["tensor"]),  # the schema has "other"
    ("unflatten", (0, (2, 2)), ["dim", "sizes"]),
    ("new_full", ((2,), 1.0), ["size", "fill_value"]), ("roll", (1, 0), ["shifts", "dims"]),
    ("narrow", (0, 1, 2), ["dim", "start", "length"]), ("add_", (1,), ["other"]), ("norm", (2, 0), ["p", "dim"]),
    ("repeat_interleave", (2,), ["repeats"]), ("permute", ([0],), ["dims"]), ("split", (2,), ["split_size"]),
    ("size", (0,), ["dim"]),
    # Any number of sizes, a dtype given as a name, names that differ between forms: left alone.
    ("view", (-1,), []), ("view", (2, 2), []), ("permute", (0,), []), ("reshape", (4,), []), ("repeat", (2,), []),
    ("expand", (4,), []), ("flip", (0,), []), ("tile", (2,), []), ("type", (torch.float64,), []), ("__add__", (2,), []),
]  # fmt: skip


@pytest.mark.parametrize(("method", "args", "names"), METHODS)
def test_method_gets_keywords_behind_its_owner(method: str, args: tuple[Any, ...], names: list[str]) -> None:
    if method == "masked_fill":
        args = (torch.tensor([True, False, True, False]), 0.0)
        names = ["mask", "value"]
    after, keywords = normalized("call_method", method, ("x", *args), {})
    assert list(keywords) == names
    assert after == (("x",) if names else ("x", *args))


@pytest.mark.parametrize("method", ["view", "reshape", "repeat", "expand", "new_zeros"])
def test_one_computed_size_may_be_a_number_or_all_sizes(method: str) -> None:
    gm = symbolic_trace(lambda x: getattr(x, method)(x.numel()))
    before = gm.code
    assert not normalize_arguments(gm)
    assert gm.code == before


class Scaled(nn.Module):
    def __init__(self, forward: Callable[..., Any] | None = None) -> None:
        super().__init__()
        if forward is not None:
            self.forward = forward

    def forward(self, x: torch.Tensor, factor: float = 2.0, *rest: float, **more: float) -> torch.Tensor:
        return x * factor + sum(rest) + sum(more.values())


def test_module_gets_the_names_of_its_forward() -> None:
    root = nn.ModuleDict({"inner": Scaled(), "pool": nn.ReLU()})
    assert normalized("call_module", "inner", ("x", 3.0), {}, root) == ((), {"x": "x", "factor": 3.0})
    assert normalized("call_module", "inner", ("x",), {"extra": 1.0}, root) == ((), {"x": "x", "extra": 1.0})
    assert normalized("call_module", "inner", ("x", 3.0, 4.0), {}, root) == (("x", 3.0, 4.0), {})
    assert normalized("call_module", "pool", ("x",), {}, root) == ((), {"input": "x"})


def test_module_with_hooks_or_a_forward_of_its_own_is_left_alone() -> None:
    hooked = nn.ReLU()
    hooked.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    root = nn.ModuleDict({"hooked": hooked, "own": Scaled(lambda y: y)})
    assert normalized("call_module", "hooked", ("x",), {}, root) == (("x",), {})
    assert normalized("call_module", "own", ("x",), {}, root) == (("x",), {})


def test_calls_that_do_not_fit_their_signature_are_left_to_the_run() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    call = graph.call_function(functional.relu, (x, False, 1, 2))
    graph.output(call)
    assert not normalize_arguments(GraphModule(nn.Module(), graph))
    assert call.args == (x, False, 1, 2)


def test_function_of_somebody_elses_that_takes_positions_only_is_left_alone() -> None:
    def positions(x: torch.Tensor, /, y: int) -> torch.Tensor:
        return x + y

    assert normalized("call_function", positions, ("x", 1), {}) == (("x", 1), {})


def test_checks_and_switches_are_left_alone() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    check = graph.call_function(check_decision, (x, 1, "one"))
    graph.call_function(torch._C._set_grad_enabled, (False,))
    graph.output(x)
    assert not normalize_arguments(GraphModule(nn.Module(), graph))
    assert check.args == (x, 1, "one")


def test_what_is_known_of_a_call_stays_true() -> None:
    gm = symbolic_trace(lambda x, y, z: functional.linear(y, bias=z, weight=x))
    (call,) = gm.graph.find_nodes(op="call_function", target=functional.linear)
    call.meta["effects"] = MeasuredEffects(writes=(1,), shares=())
    before = call.meta
    y, z, x = call.all_input_nodes
    assert normalize_arguments(gm)
    assert list(call.kwargs.items()) == [("input", y), ("weight", x), ("bias", z)]
    assert Effects(gm.graph, gm).of(call).writes == (z,)
    assert before["effects"] == MeasuredEffects(writes=(1,), shares=())


def test_writes_are_still_seen() -> None:
    gm = symbolic_trace(lambda x: functional.relu(x, True) + x.add_(1))
    inputs = torch.arange(4.0) - 2
    expected = gm(inputs.clone())
    writers = [node.name for node in gm.graph.nodes if Effects(gm.graph, gm).of(node).writes]
    assert normalize_arguments(gm)
    assert [node.name for node in gm.graph.nodes if Effects(gm.graph, gm).of(node).writes] == writers
    assert torch.equal(gm(inputs), expected)
