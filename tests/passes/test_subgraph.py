from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import featx
from featx import symbolic_trace, trace
from featx.errors import ForeignNodeError, NodeNameError, PassError
from featx.passes import extract_subgraph

X = torch.arange(8.0).reshape(2, 4) - 3


class Hooks:
    """What forward hooks see of a model: a copy of the output of each module, by path."""

    def __init__(self, model: nn.Module) -> None:
        self.seen: dict[str, Any] = {}
        for path, module in model.named_modules():
            module.register_forward_hook(lambda _m, _i, output, path=path: self.seen.__setitem__(path, output.clone()))


def stack() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)), nn.Linear(4, 2)
    )


@pytest.mark.parametrize("tracer", [symbolic_trace, lambda model: trace(model, X)])
@pytest.mark.parametrize(
    ("given", "wanted"), [("0", "2"), ("1", "3"), ("2.0", "2.0"), ("0", "0"), ("2", "3"), ("1", "2.0")]
)
def test_part_computes_what_hooks_see(tracer: Callable[[nn.Module], Any], given: str, wanted: str) -> None:
    model = stack()
    gm = tracer(model)
    part = extract_subgraph(gm, [given], wanted)
    hooks = Hooks(model)
    model(X)
    assert torch.equal(part(hooks.seen[given].clone()), hooks.seen[wanted])


def test_only_what_is_needed_is_there_and_weights_are_shared() -> None:
    model = stack()
    gm = symbolic_trace(model)
    before = gm.code
    part = extract_subgraph(gm, ["1"], ["2"])
    assert [node.target for node in part.graph.nodes if node.op == "call_module"] == ["2.0", "2.1"]
    assert set(part.state_dict()) == {"2.0.weight", "2.0.bias"}
    assert part.get_parameter("2.0.weight") is model[2][0].weight
    assert gm.code == before


def test_one_output_gives_its_value_and_a_list_a_tuple() -> None:
    gm = symbolic_trace(lambda x: torch.relu(x) * 2)
    assert torch.equal(extract_subgraph(gm, "x", "relu")(X), X.relu())
    (value,) = extract_subgraph(gm, ["x"], ["relu"])(X)
    assert torch.equal(value, X.relu())
    relu = next(node for node in gm.graph.nodes if node.name == "relu")
    first, second = extract_subgraph(gm, relu, [relu, "mul"])(X)
    assert torch.equal(first, X)
    assert torch.equal(second, X * 2)


def test_inputs_come_in_the_order_in_which_they_are_named() -> None:
    gm = symbolic_trace(lambda x, y: x - y)
    assert torch.equal(extract_subgraph(gm, ["y", "x"], "sub")(X, X * 3), X * 2)


def test_overwritten_output_is_the_value_as_it_was_computed() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        return y.relu_() + 1

    gm = symbolic_trace(forward)
    before, after = extract_subgraph(gm, ["x"], ["mul", "add"])(X.clone())
    assert torch.equal(before, X * 2)
    assert torch.equal(after, forward(X))
    assert "clone" not in str(extract_subgraph(gm, ["x"], ["mul"]).graph)


def test_writes_into_what_is_given_are_kept_as_far_as_they_come_later() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        z = y.view(-1)
        y.add_(1)
        z.mul_(3)
        return torch.neg(y)

    gm = symbolic_trace(forward)
    y = X * 2
    assert torch.equal(extract_subgraph(gm, ["mul"], "neg")(y.clone()), forward(X))
    # Both writes come after "mul"; only one comes after "add_", which is given with what was written before.
    assert torch.equal(extract_subgraph(gm, ["add_", "view"], "view")(y + 1, y.view(-1)), y.view(-1))


def test_given_values_that_share_written_memory_are_refused() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        z = y.view(-1)
        y.add_(1)
        return torch.neg(z)

    gm = symbolic_trace(forward)
    before = gm.code
    with pytest.raises(PassError, match="'mul' and 'view' share memory that 'add_' writes"):
        extract_subgraph(gm, ["mul", "view"], "neg")
    assert gm.code == before


def test_missing_input_is_named_with_the_way_to_it() -> None:
    gm = symbolic_trace(lambda x, y: torch.neg(torch.relu(x) + torch.exp(y)))
    with pytest.raises(
        PassError, match=r"'neg' cannot be computed .* also needs 'y' \('neg' <- 'add' <- 'exp' <- 'y'\)"
    ):
        extract_subgraph(gm, ["relu"], ["neg"])


@pytest.mark.parametrize(
    ("given", "wanted", "error", "message"),
    [
        (["rleu"], ["neg"], NodeNameError, "Did you mean 'relu'"),
        (["x"], ["nge"], NodeNameError, "Did you mean 'neg'"),
        (["x", "x"], ["neg"], PassError, "'x' is named twice"),
        (["x"], [], PassError, "at least one output"),
        (["output"], ["neg"], NodeNameError, "No node 'output'"),
    ],
)
def test_wishes_that_cannot_be_are_refused(given: Any, wanted: Any, error: type[Exception], message: str) -> None:
    gm = symbolic_trace(lambda x: torch.neg(torch.relu(x)))
    with pytest.raises(error, match=message):
        extract_subgraph(gm, given, wanted)


def test_nodes_of_other_graphs_are_refused() -> None:
    gm, other = (symbolic_trace(lambda x: torch.neg(x)) for _ in range(2))
    with pytest.raises(ForeignNodeError, match="'neg'"):
        extract_subgraph(gm, ["x"], list(other.graph.nodes)[1:2])
    with pytest.raises(ForeignNodeError, match="'output'"):
        extract_subgraph(gm, ["x"], gm.graph.output_node())


def test_input_with_a_default_that_nobody_gives_stays_with_it() -> None:
    def forward(x: torch.Tensor, factor: float = 3.0) -> torch.Tensor:
        return torch.relu(x) * factor

    part = extract_subgraph(symbolic_trace(forward), ["relu"], "mul")
    assert torch.equal(part(X), X * 3)
    assert torch.equal(part(X, 2.0), X * 2)


def test_keyword_only_input_is_given_by_position() -> None:
    def forward(x: torch.Tensor, *, factor: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) * factor

    part = extract_subgraph(symbolic_trace(forward), ["factor", "relu"], "mul")
    assert torch.equal(part(X * 3, X), X * X * 3)


def test_modes_are_as_in_the_whole() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            a = torch.relu(x)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                b = a @ a.t()
        return torch.neg(b)

    gm = trace(forward, X)
    part = extract_subgraph(gm, ["relu"], ["matmul", "neg"])
    x = X.relu().requires_grad_()
    matmul, neg = part(x)
    assert (matmul.dtype, matmul.requires_grad) == (torch.bfloat16, False)
    assert torch.equal(neg, forward(X))


def test_draws_that_nothing_needs_are_left_out_and_a_seed_counts() -> None:
    gm = symbolic_trace(lambda x: (torch.rand(2, 4), torch.relu(x) + 1))
    assert "rand" not in str(extract_subgraph(gm, ["x"], ["add"]).graph)
    graph = featx.Graph()
    relu = graph.call_function(torch.relu, (graph.placeholder("x"),))
    graph.call_function(torch.manual_seed, (3,))
    draws = [graph.call_function(torch.rand, (2, 4)) for _ in range(2)]
    graph.output((graph.call_function(torch.add, (relu, draws[1])), draws[0]))
    whole = featx.GraphModule(nn.Module(), graph)
    part = extract_subgraph(whole, ["relu"], "add")
    assert torch.equal(part(X.relu()), whole(X)[0])


def test_guards_of_what_is_given_stay_and_those_of_the_rest_go() -> None:
    def forward(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        a = torch.relu(x)
        if a.shape[0] > 1:
            a = a + 1
        if y.shape[0] > 1:
            a = a * y.sum()
        return torch.neg(a)

    gm = trace(forward, X, X)
    part = extract_subgraph(gm, ["relu"], ["add"])
    assert torch.equal(part(X)[0], X + 1)
    with pytest.raises(featx.SpecializationError):
        part(X[:1])


def test_state_that_is_written_later_is_written_too() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x + self.count
            self.count.add_(1)
            return y * 2

    model = Counter()
    part = extract_subgraph(symbolic_trace(model), ["x"], "add")
    assert [part(X).sum().item() - X.sum().item() for _ in range(3)] == [0, 8, 16]
    assert model.count.item() == 3


def test_guard_of_a_given_value_that_was_written_before_stays() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        y = (x * 2).add_(1)
        if y.shape[0] > 1:
            y = y * 3
        return torch.neg(y)

    part = extract_subgraph(trace(forward, X), ["add_"], "neg")
    assert torch.equal(part(X * 2 + 1), forward(X))
    with pytest.raises(featx.SpecializationError):
        part(X[:1])


def test_writes_ahead_of_a_given_value_are_in_it() -> None:
    gm = symbolic_trace(lambda x: torch.neg((x * 2).add_(1).sub_(5)))
    assert torch.equal(extract_subgraph(gm, ["sub_"], "neg")(X), -X)


class Assigning(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.table = self.table + 1
        return x + self.table


def test_attribute_that_a_module_assigns_is_read_as_it_is_at_the_time() -> None:
    graph = featx.Graph()
    x = graph.placeholder("x")
    read = graph.call_function(torch.neg, (graph.get_attr("0.table"),))
    graph.output((read, graph.call_module("0", (x,))))
    model = nn.Sequential(Assigning())
    gm = featx.GraphModule(model, graph)
    part = extract_subgraph(gm, [], "neg")
    for count in range(3):
        assert part().item() == -count
        model(X)
