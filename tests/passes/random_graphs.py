"""Random graphs with views, in-place writes, random draws, state and modes, and what running one leaves behind."""

from __future__ import annotations

import copy
import operator
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.nn import functional

from featx import Graph, GraphModule, Node
from featx.errors import SpecializationError
from featx.ir.effects import MeasuredEffects
from featx.tracing.guards.guards import check_decision

# `choose(limit)` gives an int from 0 to limit - 1.
Choose = Callable[[int], int]


class Counting(nn.Module):
    """A module that nothing is known of: it counts its calls, draws numbers and assigns a buffer anew."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("table", torch.zeros(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.table = self.table + self.calls + torch.rand(4, 4)
        return x * self.calls


def write_second(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    b.add_(1)
    return a * 2


class Model(nn.Module):
    """The modules and tensors that random graphs use. Every value is a 4 x 4 matrix, or two rows of one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.same_norm = self.norm
        self.drop = nn.Dropout(0.5)
        self.relu = nn.ReLU(inplace=True)
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
        self.counting = Counting()
        self.weight = nn.Parameter(torch.rand(4, 4))
        self.frozen = nn.Parameter(torch.rand(4, 4), requires_grad=False)
        self.tied = self.frozen
        self.register_buffer("table", torch.rand(4, 4))
        self.register_buffer("count", torch.zeros(4, 4))


LITERAL = torch.full((4, 4), 0.5)
ATTRIBUTES = ("weight", "frozen", "tied", "table", "count", "norm.running_mean", "inner.0.weight", "counting.table")
MODULES = ("linear", "norm", "same_norm", "drop", "relu", "inner", "counting")
Emit = Callable[[Graph, Node, Node], Node]


def function(target: Callable[..., Any], *args: Any, **kwargs: Any) -> Emit:
    return lambda graph, a, b: graph.call_function(target, (a, *args), kwargs)


def method(target: str, *args: Any) -> Emit:
    return lambda graph, a, b: graph.call_method(target, (a, *args))


def measured(graph: Graph, a: Node, b: Node) -> Node:
    node = graph.call_function(write_second, (a, b))
    position = node.all_input_nodes.index(b)
    node.meta["effects"] = MeasuredEffects(writes=(position,), shares=())
    return node


EMITTERS: list[Emit] = [
    lambda graph, a, b: graph.call_function(torch.add, (a, b)),
    lambda graph, a, b: graph.call_function(operator.mul, (a, b)),
    function(torch.tanh),
    function(operator.mul, 2),
    function(operator.mul, 2.0),
    function(functional.softmax, dim=1),
    function(operator.add, LITERAL),
    lambda graph, a, b: graph.call_function(torch.ones, (4, 4)),
    lambda graph, a, b: graph.call_function(torch.arange, (4.0,)),
    lambda graph, a, b: graph.call_function(torch.cat, ([a, b],)),
    # views
    method("view_as", LITERAL),
    method("transpose", 0, 1),
    function(operator.getitem, slice(0, 4)),
    function(operator.getitem, slice(0, 2)),
    lambda graph, a, b: graph.call_function(operator.getitem, (graph.call_method("chunk", (a, 2)), 1)),
    method("contiguous"),
    # writes
    method("add_", 1),
    method("mul_", 0.5),
    lambda graph, a, b: graph.call_function(operator.iadd, (a, b)),
    function(functional.relu, inplace=True),
    function(operator.setitem, 0, 1.5),
    lambda graph, a, b: graph.call_method("copy_", (a, b)),
    lambda graph, a, b: graph.call_function(write_second, (a, b)),
    measured,
    # draws
    function(torch.rand_like),
    function(functional.dropout, 0.5, True),
    function(functional.dropout, 0.5, False),
    function(functional.dropout1d, 0.5, False),
]  # fmt: skip


def build(choose: Choose) -> GraphModule:
    """Return a random graph module with the inputs `x` and `y`; many of them raise when they run."""
    graph = Graph()
    values = [graph.placeholder("x"), graph.placeholder("y")]
    caller: Node | None = None
    region: Node | None = None
    # Few kinds of calls, so that some are made twice.
    emitters = [EMITTERS[choose(len(EMITTERS))] for _ in range(2 + choose(6))]
    attribute, module = choose(len(ATTRIBUTES)), choose(len(MODULES))
    for _ in range(2 + choose(14)):
        kind = choose(12)
        a, b = values[-1 - choose(min(len(values), 6))], values[-1 - choose(len(values))]
        if kind == 9:
            values.append(graph.get_attr(ATTRIBUTES[attribute - choose(2)]))
        elif kind == 10:
            values.append(graph.call_module(MODULES[module - choose(3)], (a,)))
        elif kind == 11 and choose(3) == 2:
            if region is None:
                region = graph.call_function(_enter_autocast, ("cpu", torch.bfloat16, True, True))
            else:
                graph.call_function(_exit_autocast, (region,))
                region = None
        elif kind == 11 and choose(2):
            rank = graph.call_function(getattr, (a, "ndim"))
            graph.call_function(check_decision, (rank, 2, "the rank")).meta["is_guard"] = True
        elif kind == 11:
            caller = caller or graph.call_function(torch.is_grad_enabled)
            graph.call_function(torch._C._set_grad_enabled, ((False, True, caller)[choose(3)],))
        else:
            node = emitters[choose(len(emitters))](graph, a, b)
            if node.target is not operator.setitem:
                values.append(node)
    if region is not None:
        graph.call_function(_exit_autocast, (region,))
    results = [values[-1 - choose(len(values))] for _ in range(choose(3))]
    graph.output((values[-1], *results))
    return GraphModule(Model(), graph)


class Outcome:
    """What two calls of a copy of a module give and leave behind: values, inputs, state, memory shared, draws."""

    def __init__(self, module: nn.Module, *, training: bool, same_inputs: bool = False) -> None:
        module = copy.deepcopy(module).train(training)
        torch.manual_seed(3)
        x = torch.rand(4, 4) - 0.5
        inputs = [x, x if same_inputs else torch.rand(4, 4) - 0.5]
        results = [*module(*inputs), *module(*inputs)]
        state = module.state_dict()
        self.tensors = [value.detach().clone() for value in (*results, *inputs)]
        self.state = {name: state[name].clone() for name in state if name.rpartition(".")[2] in STATE}
        self.needs_gradients = [value.requires_grad for value in results]
        memory = [value.untyped_storage().data_ptr() for value in (*results, *inputs)]
        self.shared = [memory.index(address) for address in memory]
        self.next_draw = torch.rand(1).item()


STATE = ("table", "count", "frozen", "running_mean", "running_var", "num_batches_tracked")


def assert_same(after: Outcome, before: Outcome) -> None:
    torch.testing.assert_close(after.tensors, before.tensors, rtol=0, atol=0, equal_nan=True)
    # A module that was split holds its tensors in several children, and one that was edited may hold fewer.
    for name, value in after.state.items():
        key = name if name in before.state else name.partition(".")[2]
        torch.testing.assert_close(value, before.state[key], rtol=0, atol=0, equal_nan=True)
    assert after.needs_gradients == before.needs_gradients
    assert after.shared == before.shared
    assert after.next_draw == before.next_draw


def outcome_of(module: nn.Module, *, training: bool, same_inputs: bool = False) -> Outcome | None:
    """Return what running `module` leaves behind, None where it raises."""
    try:
        return Outcome(module, training=training, same_inputs=same_inputs)
    except SpecializationError:
        raise
    except (RuntimeError, ValueError, IndexError, TypeError):
        return None


def choosing_with(seed: int) -> Choose:
    """Return a `choose` for a fixed random graph."""
    return random.Random(seed).randrange


def check_pass(
    change: Callable[[GraphModule], Any], choose: Choose, *, needs_gradients: bool = True, both_modes: bool = True
) -> bool:
    """Build a random module, let `change` edit it or return another one, and compare; say whether that was possible."""
    gm = build(choose)
    training, same_inputs = bool(choose(2)), choose(4) == 3
    gm.train(training)
    modes: Sequence[bool] = (training, not training) if both_modes else (training,)
    try:
        before = {mode: outcome_of(gm, training=mode, same_inputs=same_inputs) for mode in modes}
    except SpecializationError:
        return False
    if before[training] is None:
        return False
    changed = change(gm)
    result = changed if isinstance(changed, GraphModule) else gm
    result.graph.lint()
    for mode in modes:
        expected = before[mode]
        try:
            after = outcome_of(result, training=mode, same_inputs=same_inputs)
        except SpecializationError:
            assert mode is not training, "the graph holds in the mode in which the pass ran"
            continue
        if expected is not None:
            assert after is not None
            if not needs_gradients:
                after.needs_gradients = expected.needs_gradients
            assert_same(after, expected)
    return True
