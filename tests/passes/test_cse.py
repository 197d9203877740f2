from __future__ import annotations

import operator
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx
from torch import nn
from torch.fx.passes.dialect.common.cse_pass import CSEPass

import featx
from featx import Graph, GraphModule, symbolic_trace
from featx.errors import SpecializationError
from featx.passes import eliminate_common_subexpressions

X = torch.arange(6.0).reshape(2, 3) - 2


def names(gm: GraphModule) -> list[str]:
    return [node.name for node in gm.graph.nodes]


def merged(forward: Callable[..., Any]) -> GraphModule:
    """Return `forward`, traced and with its common subexpressions merged, after comparing what it computes."""
    gm = symbolic_trace(forward)
    assert eliminate_common_subexpressions(gm)
    gm.graph.lint()
    torch.testing.assert_close(gm(X.clone()), forward(X.clone()), rtol=0, atol=0)
    return gm


def stays(forward: Callable[..., Any]) -> None:
    gm = symbolic_trace(forward)
    before = gm.code
    assert not eliminate_common_subexpressions(gm)
    assert gm.code == before
    torch.testing.assert_close(gm(X.clone()), forward(X.clone()), rtol=0, atol=0)


def test_second_call_reads_the_first() -> None:
    gm = merged(lambda x: torch.relu(x * 2) + torch.relu(x * 2))
    assert gm.code.split("\n")[4:8] == [
        "    mul = x * 2;  x = None",
        "    relu = torch.relu(mul);  mul = None",
        "    add = relu + relu;  relu = None",
        "    return add",
    ]


def test_operators_with_keywords_lists_and_slices_are_compared_deeply() -> None:
    gm = merged(lambda x: torch.cat([x, x[:, 1:]], dim=1).sum() + torch.cat([x, x[:, 1:]], dim=1).sum())
    assert names(gm) == ["x", "getitem", "cat", "sum_1", "add", "output"]


@pytest.mark.parametrize(
    ("one", "other"), [(2, 2.0), (1, True), (0.0, -0.0), (torch.float32, torch.float64), ((0, 1), [0, 1])]
)
def test_arguments_that_compare_equal_and_mean_something_else_stay_apart(one: Any, other: Any) -> None:
    graph = Graph()
    x = graph.placeholder("x")
    values = [graph.call_method("sum", (x,), {"dim": value}) for value in (one, other)]
    graph.output(graph.call_function(torch.add, tuple(values)))
    assert not eliminate_common_subexpressions(GraphModule(nn.Module(), graph))
    values[1].kwargs = values[0].kwargs
    assert eliminate_common_subexpressions(GraphModule(nn.Module(), graph))


def test_equal_numbers_that_are_not_numbers_are_merged() -> None:
    gm = symbolic_trace(lambda x: (x * float("nan")).isnan() & (x * float("nan")).isnan())
    assert eliminate_common_subexpressions(gm)
    assert gm(X).all()


@pytest.mark.parametrize(
    "forward",
    [
        pytest.param(lambda x: torch.rand_like(x) - torch.rand_like(x) > 2, id="draws"),
        pytest.param(lambda x: (x * 2.0).add_(1) + x * 2.0, id="first is written"),
        pytest.param(lambda x: x * 2.0 + (x * 2.0).add_(1), id="second is written"),
        pytest.param(lambda x: (x + 1) * x.add_(1) * (x + 1), id="input is written between"),
        pytest.param(lambda x: (x * 2.0, x * 2.0), id="both are returned"),
        pytest.param(lambda x: ((x * 2.0)[0], (x * 2.0)[0]), id="views of both are returned"),
        pytest.param(lambda x: torch.zeros(2).add_(x.sum()) + torch.zeros(2), id="fresh memory is written"),
    ],
)
def test_calls_that_must_both_run_stay(forward: Callable[[torch.Tensor], Any]) -> None:
    torch.manual_seed(0)
    stays(forward)


def test_value_and_a_view_of_its_twin_are_not_both_returned() -> None:
    gm = merged(lambda x: (torch.relu(x * 2.0) + 1, x * 2.0))
    assert names(gm).count("mul") == 1
    stays(lambda x: (x * 2.0, (x * 2.0).view(-1)))


def test_merged_value_is_returned_once() -> None:
    gm = merged(lambda x: (torch.relu(x * 2.0), x * 2.0, x * 2.0))
    assert sum(node.target is operator.mul for node in gm.graph.nodes) == 2
    _, one, other = gm(X)
    assert one.data_ptr() != other.data_ptr()


def test_statistics_that_train_mode_writes_between_are_merged_and_the_mode_checked() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            before = self.norm.running_mean * 2
            return self.norm(x) * before + self.norm.running_mean * 2

    model = Model().eval()
    gm = symbolic_trace(model)
    assert eliminate_common_subexpressions(gm)
    assert torch.equal(gm(X), model(X))
    with pytest.raises(SpecializationError, match="train mode"):
        gm.train()(X)


def test_calls_in_other_modes_stay() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                y = self.weight * 2
            return y + self.weight * 2

    gm = symbolic_trace(Model())
    eliminate_common_subexpressions(gm)
    assert names(gm).count("mul") + names(gm).count("mul_1") == 2
    gm(X).sum().backward()
    assert gm.weight.grad is not None
    assert torch.equal(gm.weight.grad, torch.full((2, 3), 2.0))


class Twice(nn.Module):
    """Calls its layer twice on one input."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.layer(x)


class Own(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


def traced_with_leaf(model: nn.Module) -> GraphModule:
    graph = Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(torch.mul, tuple([graph.call_module("layer", (x,)) for _ in range(2)])))
    return GraphModule(model, graph)


def test_modules_of_torch_are_merged_and_those_of_others_stay() -> None:
    assert eliminate_common_subexpressions(traced_with_leaf(Twice(nn.Linear(3, 3))))
    assert not eliminate_common_subexpressions(traced_with_leaf(Twice(Own())))
    hooked = nn.Linear(3, 3)
    hooked.register_forward_hook(lambda *_: None)
    assert not eliminate_common_subexpressions(traced_with_leaf(Twice(hooked)))


@pytest.mark.parametrize("layer", [nn.Dropout(), nn.BatchNorm1d(3)])
def test_module_that_differs_in_train_mode_is_merged_in_eval_mode_and_the_mode_checked(layer: nn.Module) -> None:
    assert not eliminate_common_subexpressions(symbolic_trace(Twice(layer).train()))
    model = Twice(layer).eval()
    gm = symbolic_trace(model)
    assert eliminate_common_subexpressions(gm)
    assert torch.equal(gm(X), model(X))
    with pytest.raises(SpecializationError, match="train mode"):
        gm.train()(X)


def test_module_in_another_mode_than_the_whole_stays() -> None:
    model = Twice(nn.Dropout()).eval()
    model.train()
    model.layer.eval()
    assert not eliminate_common_subexpressions(symbolic_trace(model))


def test_parameter_that_is_read_twice_is_read_once() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight + self.weight

    gm = symbolic_trace(Model())
    eliminate_common_subexpressions(gm)
    assert [node.op for node in gm.graph.nodes].count("get_attr") == 1


def test_measured_effects_mean_the_same_inputs() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    one, other = graph.call_function(torch.neg, (x,)), graph.call_function(torch.neg, (x,))
    reader = graph.call_function(torch.add, (graph.call_function(torch.abs, (x,)), other))
    reader.meta["effects"] = featx.ir.effects.MeasuredEffects(shares=(1,))
    graph.output((reader, graph.call_function(torch.add, (one, 1))))
    assert eliminate_common_subexpressions(GraphModule(nn.Module(), graph))
    assert reader.args[1] is one
    assert reader.meta["effects"].shares == (1,)


def node_as_text(node: Any) -> tuple[str, ...]:
    return (node.op, str(node.target), node.name, str(node.args))


@pytest.mark.slow
def test_pure_graphs_come_out_as_from_torch_fx() -> None:
    operators = (torch.ops.aten.neg.default, torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor)
    merged_nodes = 0
    for seed in range(40):
        results: dict[Any, Any] = {}
        for library in (featx, torch.fx):
            choice = random.Random(seed)
            graph = library.Graph()
            values = [graph.placeholder("x"), graph.placeholder("y")]
            for _ in range(25):
                target = choice.choice(operators)
                count = 1 if target is operators[0] else 2
                values.append(graph.call_function(target, tuple(choice.choice(values[-8:]) for _ in range(count))))
            # One result: both sides would have to agree about what the caller may get twice.
            graph.output(graph.call_function(torch.ops.aten.cat.default, (values[2:],)))
            results[library] = library.GraphModule(nn.Module(), graph)
        size = len(results[featx].graph.nodes)
        peer = CSEPass()(results[torch.fx])
        assert eliminate_common_subexpressions(results[featx]) is bool(peer.modified)
        results[torch.fx] = peer.graph_module
        ours, theirs = ([node_as_text(node) for node in results[side].graph.nodes] for side in (featx, torch.fx))
        merged_nodes += size - len(ours)
        assert ours == theirs
        inputs = (torch.rand(2), torch.rand(2))
        assert torch.equal(results[featx](*inputs), results[torch.fx](*inputs))
    assert merged_nodes > 40


def test_setitem_between_two_reads_is_seen() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    first = graph.call_function(operator.getitem, (x, 0))
    one = graph.call_function(torch.neg, (first,))
    graph.call_function(operator.setitem, (x, 0, 5.0))
    other = graph.call_function(torch.neg, (first,))
    graph.output(graph.call_function(torch.sub, (one, other)))
    gm = GraphModule(nn.Module(), graph)
    eliminate_common_subexpressions(gm)
    assert gm(torch.zeros(2)).item() == 5
