from __future__ import annotations

import collections
import copy
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn import functional

from featx import Graph, GraphModule, Node

COPIES = pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda graph: pickle.loads(pickle.dumps(graph))], ids=["deepcopy", "pickle"]
)


class Pair(NamedTuple):
    left: Any
    right: Any


def sample() -> Graph:
    graph = Graph()
    x = graph.placeholder("x", type_expr=torch.Tensor, default_value=None)
    relu = graph.call_function(torch.relu, (x,), name="activation")
    pool = graph.call_function(functional.max_pool2d, (relu, 2), {"stride": [2, (x,)]})
    graph.output(Pair(pool, {"k": slice(relu, None, 1.5)}))
    return graph


@COPIES
def test_copy_prints_and_reads_as_the_original(duplicate: Callable[[Graph], Graph]) -> None:
    graph = sample()
    copied = duplicate(graph)
    assert str(copied) == str(graph)
    assert copied.python_code("self").src == graph.python_code("self").src
    assert type(copied.output_node().args[0]) is Pair
    copied.lint()


@COPIES
def test_copy_shares_no_node_with_the_original(duplicate: Callable[[Graph], Graph]) -> None:
    graph = sample()
    copied = duplicate(graph)
    assert not set(copied.nodes) & set(graph.nodes)
    assert all(node.graph is copied for node in copied.nodes)
    list(copied.nodes)[1].target = torch.neg
    assert list(graph.nodes)[1].target is torch.relu


@COPIES
def test_new_nodes_of_a_copy_get_the_names_that_those_of_the_original_get(
    duplicate: Callable[[Graph], Graph],
) -> None:
    graph = sample()
    copied = duplicate(graph)
    for name in ("x", "activation", "max_pool2d", "free"):
        assert copied.create_node("placeholder", name).name == graph.create_node("placeholder", name).name


@COPIES
def test_copy_keeps_a_name_that_was_set_by_hand(duplicate: Callable[[Graph], Graph]) -> None:
    graph = sample()
    list(graph.nodes)[1].name = "len"
    assert [node.name for node in duplicate(graph).nodes] == ["x", "len", "max_pool2d", "output"]


@COPIES
def test_copy_keeps_users_in_their_order(duplicate: Callable[[Graph], Graph]) -> None:
    graph = Graph()
    x = graph.placeholder("x")
    for function in (torch.relu, torch.neg, torch.abs):
        graph.call_function(function, (x,))
    assert [user.name for user in next(iter(duplicate(graph).nodes)).users] == ["relu", "neg", "abs_1"]


@COPIES
def test_meta_that_names_nodes_names_those_of_the_copy(duplicate: Callable[[Graph], Graph]) -> None:
    graph = sample()
    x, relu, *_ = graph.nodes
    x.meta["later"], relu.meta["earlier"] = [relu], {"from": (x,)}
    copied = duplicate(graph)
    their_x, their_relu, *_ = copied.nodes
    assert their_x.meta == {"later": [their_relu]}
    assert their_relu.meta == {"earlier": {"from": (their_x,)}}
    assert pickle.loads(pickle.dumps(copied)) is not None


@COPIES
def test_meta_without_nodes_keeps_its_values_and_their_types(duplicate: Callable[[Graph], Graph]) -> None:
    graph = sample()
    x = next(iter(graph.nodes))
    x.meta = {"order": collections.OrderedDict(a=1), "list": [1, {2}], "default": collections.defaultdict(int)}
    copied = next(iter(duplicate(graph).nodes))
    assert copied.meta == x.meta
    assert copied.meta is not x.meta
    assert [type(value) for value in copied.meta.values()] == [collections.OrderedDict, list, collections.defaultdict]


@pytest.mark.parametrize(
    "function",
    [torch.relu, functional.gelu, functional.max_pool2d, functional.adaptive_max_pool1d, torch.ops.aten.relu.default,
     torch.ops.aten.relu, torch.Tensor.add, torch.fft.fft, torch.Size, getattr],
)  # fmt: skip
def test_function_is_the_same_object_after_pickling(function: Callable[..., Any]) -> None:
    graph = Graph()
    graph.call_function(function, (1,))
    assert next(iter(pickle.loads(pickle.dumps(graph)).nodes)).target is function


def test_tensor_in_arguments_is_copied_once() -> None:
    graph, tensor = Graph(), torch.ones(2)
    graph.call_function(torch.add, (tensor, [tensor]))
    node = next(iter(copy.deepcopy(graph).nodes))
    assert node.args[0] is node.args[1][0]
    assert node.args[0] is not tensor
    assert torch.equal(node.args[0], tensor)


def test_deepcopy_takes_part_in_a_larger_copy() -> None:
    graph = sample()
    relu = list(graph.nodes)[1]
    copied, (node, again) = copy.deepcopy((graph, [relu, graph]))
    assert node is list(copied.nodes)[1]
    assert again is copied


def test_pickled_node_keeps_its_place_in_its_pickled_graph() -> None:
    graph = sample()
    copied, node = pickle.loads(pickle.dumps((graph, list(graph.nodes)[1])))
    assert node is list(copied.nodes)[1]


def test_code_transformer_is_kept_by_deepcopy() -> None:
    graph = sample()
    graph.on_generate_code(lambda _: lambda body: ["marker = 1\n", *body])
    assert "marker = 1" in copy.deepcopy(graph).python_code("self").src


@pytest.mark.slow
@COPIES
def test_chain_of_a_hundred_thousand_nodes_is_copied_without_recursion(duplicate: Callable[[Graph], Graph]) -> None:
    graph = Graph()
    node: Node = graph.placeholder("x")
    for _ in range(100_000):
        node = graph.call_function(torch.relu, (node,))
    graph.output(node)
    copied = duplicate(graph)
    assert len(copied.nodes) == 100_002
    assert copied.output_node().args[0].name == "relu_99999"
    assert copied.output_node().prev.args[0] is copied.output_node().prev.prev


@pytest.mark.slow
def test_graph_module_of_a_long_chain_pickles_and_deep_copies_without_recursion() -> None:
    # torch.fx raises RecursionError at 300 nodes.
    graph = Graph()
    node: Node = graph.placeholder("x")
    for _ in range(3000):
        node = graph.call_function(torch.neg, (node,))
    graph.output(node)
    module = GraphModule(torch.nn.Module(), graph)
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert copied(torch.tensor(2.0)).item() == 2.0
