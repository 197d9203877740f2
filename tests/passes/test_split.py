from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx
from torch import nn
from torch.fx.passes.split_module import split_module as torch_fx_split_module

import featx
from featx import GraphModule, Node, symbolic_trace, trace
from featx.errors import NodeNameError, PassError
from featx.passes import split_at, split_module

X = torch.arange(8.0).reshape(2, 4) - 3


class Model(nn.Module):
    """torch.fx's own example: a parameter, one layer called twice, and two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.param = nn.Parameter(torch.rand(2, 4))
        self.linear = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = self.linear(x + self.param).clamp(min=0.0, max=1.0)
        w = self.linear(y).clamp(min=0.0, max=1.0)
        return z + w


def keys_of(graph: Any, keys: list[Any]) -> Callable[[Any], Any]:
    calls = [node for node in graph.nodes if node.op.startswith("call")]
    checks = [node for node in calls if node.meta.get("is_check_of_input")]  # what an example adds
    calls = [node for node in calls if node not in checks]
    return {**dict.fromkeys(checks, keys[0]), **dict(zip(calls, keys, strict=True))}.__getitem__


def both(model: nn.Module, keys: list[Any], **options: Any) -> tuple[GraphModule, Any]:
    """Return what featx and torch.fx make of `model` with these keys for its calls, compared on random inputs."""
    ours, theirs = symbolic_trace(model), torch.fx.symbolic_trace(model)
    inputs = [torch.rand(2, 4) for _ in ours.graph.find_nodes(op="placeholder")]
    one = split_module(ours, model, keys_of(ours.graph, keys), **options)
    other = torch_fx_split_module(theirs, model, keys_of(theirs.graph, keys), **options)
    one.graph.lint()
    torch.testing.assert_close(one(*inputs), other(*inputs), rtol=0, atol=0)
    torch.testing.assert_close(one(*inputs), model(*inputs), rtol=0, atol=0)
    return one, other


def calls(module: Any) -> list[str]:
    nodes = [node for node in module.graph.nodes if not node.meta.get("is_check_of_input")]
    return [str(node.target) for node in nodes if node.op.startswith("call")]


def children(module: Any) -> dict[str, list[str]]:
    return {name: calls(child) for name, child in module.named_children()}


@pytest.mark.parametrize(
    "keys", [[0, 1, 2, 0, 1, 2], [0, 0, 0, 1, 1, 1], [1, 1, 1, 0, 0, 1], ["a", "a", "b", "c", "c", "b"]]
)
def test_children_are_those_of_torch_fx(keys: list[Any]) -> None:
    ours, theirs = both(Model(), keys)
    assert children(ours) == children(theirs)
    # A parameter is read where it is used, and not handed from child to child; all else is torch.fx's.
    assert sorted(calls(ours)) == sorted(calls(theirs))


@pytest.mark.parametrize("keys", [[0, 1, 2, 0, 1, 2], [0, 0, 0, 1, 1, 1]])
def test_options_are_those_of_torch_fx(keys: list[Any]) -> None:
    our_map: dict[str, str] = {}
    their_map: dict[str, str] = {}
    model = Model()
    ours, theirs = symbolic_trace(model), torch.fx.symbolic_trace(model)
    options: dict[str, Any] = {"partition_affix": "pp", "tuple_return": True, "keep_original_input_name": False}
    one = split_module(ours, model, keys_of(ours.graph, keys), our_map, **options)
    other = torch_fx_split_module(theirs, model, keys_of(theirs.graph, keys), their_map, **options)
    assert children(one) == children(other)
    assert our_map == their_map
    for child in one.children():
        assert isinstance(child, GraphModule)
        assert isinstance(child.graph.output_node().args[0], tuple)
        inputs = [node.name for node in child.graph.find_nodes(op="placeholder")]
        assert inputs == [f"arg_{number}" for number in range(len(inputs))]
    x = torch.rand(2, 4)
    assert torch.equal(one(x, x), model(x, x))


@pytest.mark.slow
def test_random_chains_are_split_as_by_torch_fx() -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(limit: int) -> int:
        return int(torch.randint(limit, (1,), generator=generator))

    refused = 0
    for _ in range(60):
        graphs = featx.Graph(), torch.fx.Graph()
        values: list[list[Any]] = [[graph.placeholder("x"), graph.placeholder("y")] for graph in graphs]
        keys: list[int] = []
        for index in range(10):
            picks = [draw(len(values[0])) for _ in range(2)]
            for graph, known in zip(graphs, values, strict=True):
                known.append(graph.call_function(torch.add, tuple(known[pick] for pick in picks)))
            keys.append(draw(3) if draw(5) == 0 else index // 4)
        for graph, known in zip(graphs, values, strict=True):
            graph.output((known[-1], known[5]))
        ours, theirs = GraphModule(nn.Module(), graphs[0]), torch.fx.GraphModule(nn.Module(), graphs[1])
        try:
            other = torch_fx_split_module(theirs, nn.Module(), keys_of(graphs[1], keys))
        except RuntimeError:
            with pytest.raises(PassError, match="cannot run one after the other"):
                split_module(ours, None, keys_of(graphs[0], keys))
            refused += 1
            continue
        one = split_module(ours, None, keys_of(graphs[0], keys))
        assert sorted(children(one).items()) == sorted(children(other).items())
        x, y = torch.rand(2), torch.rand(2)
        torch.testing.assert_close(one(x, y), other(x, y), rtol=0, atol=0)
    assert 5 < refused < 50


def test_module_and_its_weights_are_shared_and_the_module_stays_as_it_is() -> None:
    model = Model()
    gm = symbolic_trace(model)
    before, state = gm.code, gm.state_dict()
    split = split_module(gm, model, keys_of(gm.graph, [0, 1, 1, 0, 1, 1]))
    assert split.submod_0.linear is model.linear
    assert split.submod_0.param is model.param
    assert gm.code == before
    assert gm.state_dict().keys() == state.keys()


def test_names_and_meta_stay() -> None:
    gm = trace(Model(), X, X)
    split = split_module(gm, None, keys_of(gm.graph, [0, 1, 1, 0, 1, 1]))
    inner = {node.name: node for child in split.children() for node in child.graph.nodes}
    for node in gm.graph.nodes:
        if node.op.startswith("call") and not node.meta.get("is_check_of_input"):
            assert inner[node.name].meta["qualified_name"] == node.meta["qualified_name"]


def test_parts_that_need_each_other_are_refused_and_the_nodes_named() -> None:
    gm = symbolic_trace(lambda x: torch.neg(torch.relu(torch.neg(x))))
    before = gm.code
    with pytest.raises(PassError, match=r"'relu' \(submod_1\) reads 'neg' \(submod_0\)") as caught:
        split_module(gm, None, keys_of(gm.graph, [0, 1, 0]))
    assert "'neg_1' (submod_0) reads 'relu' (submod_1)" in str(caught.value)
    assert gm.code == before


@pytest.mark.parametrize(
    ("forward", "keys"),
    [
        # The read of x after the write must not run before it, nor the one before it after it.
        pytest.param(lambda x: (x * 2, x.add_(1), x * 3), [0, 1, 0], id="read, write, read"),
        pytest.param(lambda x: (y := x * 1)[0].add_(1) + torch.relu(y), [0, 0, 1, 0, 1], id="a view is written"),
        pytest.param(lambda x: (torch.rand(2), torch.rand(2), torch.rand(2), x), [0, 1, 0], id="draws"),
    ],
)
def test_order_of_effects_that_parts_cannot_keep_is_refused(forward: Callable[..., Any], keys: list[int]) -> None:
    gm = symbolic_trace(forward)
    with pytest.raises(PassError, match="must run after"):
        split_module(gm, None, keys_of(gm.graph, keys))


def test_effects_come_in_the_order_in_which_they_did() -> None:
    def forward(x: torch.Tensor) -> Any:
        y = x * 2
        x.add_(1)
        noise = torch.rand(2, 4)
        return x * 3 + y, torch.relu_(y) + noise, torch.rand(2)

    gm = symbolic_trace(forward)
    split = split_module(gm, None, keys_of(gm.graph, [0, 1, 2, 3, 3, 4, 4, 2]))
    assert calls(split.submod_2).count(str(torch.rand)) == 2  # no other part draws between
    results: list[Any] = []
    for module in (forward, gm, split):
        torch.manual_seed(0)
        inputs = X.clone()
        results.append((*module(inputs), inputs))
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)
    torch.testing.assert_close(results[2], results[0], rtol=0, atol=0)


@pytest.mark.slow
def test_modes_are_set_in_each_part() -> None:
    def forward(x: torch.Tensor) -> Any:
        a = x * 2
        with torch.no_grad():
            b = a * 3
            with torch.autocast("cpu", dtype=torch.bfloat16):
                c = b @ b.t()
            d = c.float() * 2
        return a + 1, b + 1, c, d

    gm = trace(forward, X)
    calls_of_gm = [node for node in gm.graph.nodes if node.op.startswith("call")]
    split = split_module(gm, None, {node: index // 3 for index, node in enumerate(calls_of_gm)}.__getitem__)
    x = X.clone().requires_grad_()
    for one, other in zip(split(x), forward(x), strict=True):
        assert torch.equal(one, other)
        assert (one.dtype, one.requires_grad) == (other.dtype, other.requires_grad)
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")


def test_module_that_was_split_is_split_again() -> None:
    model = Model()
    gm = symbolic_trace(model)
    once = split_module(gm, None, keys_of(gm.graph, [0, 0, 1, 1, 1, 1]))
    twice = split_module(once, None, lambda node: 0)
    assert list(dict(twice.named_children())) == ["submod_0"]
    assert torch.equal(twice(X, X), model(X, X))


def test_child_does_not_take_the_name_of_what_the_graph_reads() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.submod_0 = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> Any:
            return torch.relu(x), self.submod_0.weight

    model = Holder()
    gm = symbolic_trace(model)
    split = split_module(gm, None, lambda node: 0)
    assert split(X)[1] is model.submod_0.weight
    assert torch.equal(split(X)[0], torch.relu(X))


def test_guards_belong_to_parts_and_still_hold() -> None:
    gm = trace(lambda x: torch.relu(x) if x.shape[0] > 1 else x, X)
    split = split_module(gm, None, keys_of(gm.graph, list(range(len(calls(gm))))))
    assert torch.equal(split(X), torch.relu(X))
    with pytest.raises(featx.SpecializationError):
        split(X[:1])


def test_part_without_a_result_runs() -> None:
    gm = symbolic_trace(lambda x: (x.add_(1), x)[1])
    split = split_module(gm, None, lambda node: 0)
    assert torch.equal(split(X.clone()), X + 1)


def scaled(x: torch.Tensor, *others: torch.Tensor, scale: float, **more: torch.Tensor) -> torch.Tensor:
    return x * scale + others[0] - more["last"]


@pytest.mark.parametrize("tracer", [symbolic_trace, lambda function: trace(function, X, X, scale=2.0, last=X)])
def test_part_gets_keyword_only_and_collected_inputs_as_any_other(tracer: Callable[..., GraphModule]) -> None:
    split = split_at(tracer(scaled), ["mul"])
    assert torch.equal(split(X, X + 1, scale=2.0, last=X * 3), scaled(X, X + 1, scale=2.0, last=X * 3))


class Assigning(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.table = self.table + 1
        return x + self.table


def test_part_reads_what_a_module_in_another_part_assigns() -> None:
    graph = featx.Graph()
    call = graph.call_module("0", (graph.placeholder("x"),))
    read = graph.call_function(torch.neg, (graph.get_attr("0.table"),))
    graph.output((call, read))
    gm = GraphModule(nn.Sequential(Assigning()), graph)
    split = split_module(gm, None, keys_of(graph, [0, 1]))
    assert not split.graph.find_nodes(op="get_attr")
    assert [split(X)[1].item() for _ in range(3)] == [-1, -2, -3]


# -- stages ------------------------------------------------------------------------------------------------------------


def test_stages_end_behind_the_named_nodes() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 2))
    gm = trace(model, X)
    split = split_at(gm, ["2", "0"])
    assert children(split) == {"submod_0": ["0"], "submod_1": ["1", "2.0", "2.1"], "submod_2": ["3"]}
    assert torch.equal(split(X), model(X))


def test_stages_can_be_named_by_nodes() -> None:
    gm = symbolic_trace(lambda x: torch.neg(torch.relu(x)))
    relu: Node = next(node for node in gm.graph.nodes if node.name == "relu")
    assert children(split_at(gm, [relu])) == {
        name: [str(getattr(torch, call))] for name, call in (("submod_0", "relu"), ("submod_1", "neg"))
    }


def test_stages_pass_on_what_is_read_later() -> None:
    model = Model()
    split = split_at(symbolic_trace(model), ["clamp"])
    assert len(dict(split.named_children())) == 2
    assert torch.equal(split(X, X), model(X, X))


@pytest.mark.parametrize(
    ("names", "error", "message"),
    [
        (["rleu"], NodeNameError, "Did you mean 'relu'"),
        ([], PassError, "at least one node"),
        (["neg"], PassError, "nothing is computed after 'neg'"),
        (["x", "relu"], PassError, "before the cut after 'x'"),
    ],
)
def test_cuts_that_cannot_be_are_refused(names: list[str], error: type[Exception], message: str) -> None:
    gm = symbolic_trace(lambda x: torch.neg(torch.relu(x)))
    before = gm.code
    with pytest.raises(error, match=message):
        split_at(gm, names)
    assert gm.code == before
