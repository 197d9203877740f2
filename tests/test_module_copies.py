from __future__ import annotations

import copy
import gc
import io
import linecache
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import featx
from featx import Graph, GraphModule, Node, symbolic_trace


class Model(nn.Module):
    """Holds one of each kind of state that a module can have."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.ReLU())
        self.unused = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.rand(3))
        self.register_buffer("offset", torch.rand(3))
        self.register_buffer("hidden", torch.rand(3), persistent=False)
        self.plain = torch.rand(3)

    def forward(self, x: torch.Tensor):
        return functional.max_pool1d(self.block(x) * self.scale + self.offset + self.hidden + self.plain, 2)


def save_and_load(module: Any) -> Any:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = pytest.mark.parametrize(
    "duplicate",
    [copy.copy, copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module)), save_and_load],
    ids=["copy", "deepcopy", "pickle", "torch.save"],
)
X = torch.tensor([[1.0, -2.0, 3.0], [0.5, 4.0, -1.0]])


def unary(function: Any = torch.neg, root: nn.Module | None = None) -> tuple[GraphModule, Node]:
    """Return a module that computes function(x), and the node that does."""
    graph = Graph()
    node = graph.call_function(function, (graph.placeholder("x"),))
    graph.output(node)
    return GraphModule(root or nn.Module(), graph), node


# -- tensors in arguments ---------------------------------------------------------------------------------------------


def with_literal() -> tuple[GraphModule, Node]:
    graph, tensor = Graph(), torch.ones(3)
    node = graph.call_function(torch.add, (graph.placeholder("x"), tensor))
    graph.output((node, tensor))
    return GraphModule(nn.Module(), graph), node


def test_tensor_in_arguments_is_a_buffer_that_is_not_saved() -> None:
    module, node = with_literal()
    assert dict(module.named_buffers())["_tensor_constant0"] is node.args[1]
    assert module.state_dict() == {}


def test_tensor_in_arguments_keeps_its_dtype_as_one_made_in_forward_does() -> None:
    module, _ = with_literal()
    module.to(torch.float64)
    module.recompile()
    assert [value.dtype for value in module(torch.zeros(3, dtype=torch.float64))] == [torch.float64, torch.float32]


def test_recompiling_names_the_same_tensor_alike_and_a_new_one_anew() -> None:
    module, node = with_literal()
    code = module.code
    module.recompile()
    assert module.code == code
    node.args = (node.args[0], torch.zeros(3))
    assert module(torch.zeros(3))[0].tolist() == [0, 0, 0]


def test_tensor_that_an_edit_takes_out_is_kept_no_longer() -> None:
    module, node = with_literal()
    gc.collect()
    sources = len(linecache.cache)
    for number in range(20):
        node.args = (node.args[0], torch.full((3,), number))
        assert module(torch.zeros(3))[0].tolist() == [number] * 3
    assert len(list(module.buffers())) == len(module._literals) == 2
    gc.collect()
    assert len(linecache.cache) <= sources
    graph = Graph()
    graph.output(graph.placeholder("x"))
    module.graph = graph
    assert not list(module.buffers())


def test_tensor_in_the_graph_of_another_mode_is_kept() -> None:
    graphs, tensor = [Graph(), Graph()], torch.ones(3)
    for graph in graphs:
        graph.output(graph.call_function(torch.add, (graph.placeholder("x"), tensor)))
    graphs[1].output_node().args = ((graphs[1].output_node().args[0],),)
    module = featx.DualGraphModule(nn.Module(), *graphs)
    assert module.train()(torch.zeros(3)).tolist() == [1, 1, 1]
    node = next(iter(reversed(graphs[0].nodes))).prev
    node.args = (node.args[0], torch.zeros(3))
    assert module(torch.zeros(3)).tolist() == [0, 0, 0]
    assert module.eval()(torch.zeros(3))[0].tolist() == [1, 1, 1]


def test_name_of_a_tensor_in_arguments_avoids_those_of_the_model() -> None:
    model = nn.Module()
    model.register_buffer("_tensor_constant0", torch.zeros(1))
    graph = Graph()
    graph.output((graph.get_attr("_tensor_constant0"), torch.ones(1)))
    assert [value.item() for value in GraphModule(model, graph)()] == [0, 1]


@COPIES
def test_tensor_in_arguments_survives_a_copy_once(duplicate: Callable[[Any], Any]) -> None:
    module, _ = with_literal()
    copied = duplicate(module)
    copied.recompile()
    assert list(dict(copied.named_buffers())) == ["_tensor_constant0"]
    assert copied(torch.zeros(3))[1] is copied._tensor_constant0
    assert (copied._tensor_constant0 is module._tensor_constant0) == (duplicate is copy.copy)


# -- copies -----------------------------------------------------------------------------------------------------------


@COPIES
def test_copy_computes_the_same_and_keeps_its_state(duplicate: Callable[[Any], Any]) -> None:
    model = Model().eval()
    module = symbolic_trace(model)
    module.meta["note"] = "kept"
    copied = duplicate(module)
    assert type(copied) is GraphModule
    assert torch.equal(copied(X), model(X))
    assert (copied.code, str(copied), copied.meta, copied.training) == (module.code, str(module), module.meta, False)
    assert list(copied.state_dict()) == list(module.state_dict())
    assert copied.graph is not module.graph
    assert copied.graph.owning_module is copied


@COPIES
def test_copy_shares_weights_only_if_it_is_shallow(duplicate: Callable[[Any], Any]) -> None:
    module = symbolic_trace(Model())
    copied = duplicate(module)
    is_shallow = duplicate is copy.copy
    assert (copied.scale is module.scale) == is_shallow
    assert (copied.block[0] is module.block[0]) == is_shallow
    assert (copied.plain is module.plain) == is_shallow


@COPIES
def test_edit_of_a_copy_does_not_reach_the_original(duplicate: Callable[[Any], Any]) -> None:
    module, _ = unary()
    copied = duplicate(module)
    copied.graph.find_nodes(op="call_function", target=torch.neg)[0].target = torch.abs
    copied.register_buffer("new", torch.ones(1), persistent=False)
    assert torch.equal(copied(X), X.abs())
    assert torch.equal(module(X), -X)
    assert not hasattr(module, "new")
    assert module._non_persistent_buffers_set == set()


@COPIES
@pytest.mark.parametrize("edit", [
    lambda gm: gm.delete_submodule("block.0"),
    lambda gm: gm.add_submodule("block.new", nn.Linear(2, 2)),
    lambda gm: gm.block.register_buffer("new", torch.ones(1)),
    lambda gm: gm.delete_all_unused_submodules(),
], ids=["delete", "add", "register", "delete unused"])  # fmt: skip
def test_parts_that_come_and_go_in_a_copy_do_not_reach_the_original(
    duplicate: Callable[[Any], Any], edit: Callable[[GraphModule], object]
) -> None:
    graph = Graph()
    node = graph.call_module("block.0", (graph.placeholder("x"),))
    graph.output(node)
    original = GraphModule(Model().eval(), graph)
    before, twin = set(original.state_dict()), duplicate(original)
    twin.graph.output_node().args = (twin.graph.find_nodes(op="placeholder")[0],)
    twin.graph.eliminate_dead_code()
    edit(twin)
    assert set(original.state_dict()) == before
    assert set(twin.state_dict()) != before


@COPIES
def test_edit_that_nobody_recompiled_is_in_the_copy(duplicate: Callable[[Any], Any]) -> None:
    module, node = unary()
    node.target = torch.abs
    assert torch.equal(duplicate(module)(X), X.abs())


@COPIES
def test_module_inside_a_module_is_copied_with_it(duplicate: Callable[[Any], Any]) -> None:
    model = nn.Sequential(symbolic_trace(Model()), nn.ReLU()).eval()
    assert torch.equal(duplicate(model)(X), model(X))


@pytest.mark.slow
@COPIES
def test_long_chain_of_modules_is_copied_without_recursion(duplicate: Callable[[Any], Any]) -> None:
    module = symbolic_trace(nn.Sequential(*[nn.Identity() for _ in range(500)]))
    assert torch.equal(duplicate(module)(X), X)
