from __future__ import annotations

import copy
import dataclasses
import gc
import operator
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx
from torch import nn

import featx
from featx import Graph, GraphModule
from featx.errors import ArgumentTypeError, ForeignNodeError, GraphError, NodeInUseError

# What both libraries mean alike is asserted of both: torch.fx says that the expectation is right.
BOTH = pytest.mark.parametrize("library", [featx, torch.fx], ids=["featx", "torch.fx"])


def chain(library: Any = featx, length: int = 3) -> Any:
    """Return the graph x -> relu -> relu_1 ... -> output."""
    graph = library.Graph()
    value = graph.placeholder("x")
    for _ in range(length):
        value = graph.call_function(torch.relu, (value,))
    graph.output(value)
    return graph


def names(nodes: Any) -> list[str]:
    return [node.name for node in nodes]


# -- new nodes --------------------------------------------------------------------------------------------------------


@BOTH
def test_short_forms_make_the_six_opcodes(library: Any) -> None:
    root = nn.Module()
    root.linear, root.weight = nn.Linear(1, 1), nn.Parameter(torch.ones(1))
    graph = library.Graph(owning_module=root) if library is featx else library.GraphModule(root, library.Graph()).graph
    if library is torch.fx:
        graph.owning_module.linear, graph.owning_module.weight = root.linear, root.weight
    x = graph.placeholder("x", type_expr=int, default_value=1)
    weight = graph.get_attr("weight")
    linear = graph.call_module("linear", (x,), {"k": 1})
    view = graph.call_method("view", (linear, -1))
    add = graph.call_function(torch.add, (view, weight), {"alpha": 2}, type_expr=str)
    output = graph.output((add,))
    assert [(node.op, node.name, node.target, node.args, node.kwargs, node.type) for node in graph.nodes] == [
        ("placeholder", "x", "x", (1,), {}, int),
        ("get_attr", "weight", "weight", (), {}, None),
        ("call_module", "linear", "linear", (x,), {"k": 1}, None),
        ("call_method", "view", "view", (linear, -1), {}, None),
        ("call_function", "add", torch.add, (view, weight), {"alpha": 2}, str),
        ("output", "output", "output", ((add,),), {}, None),
    ]
    assert graph.output_node() is output


@BOTH
def test_name_is_a_wish_that_is_numbered_where_it_is_taken(library: Any) -> None:
    graph = library.Graph()
    assert names(graph.create_node("call_function", torch.relu, name=wish) for wish in ("act", "act", None)) == [
        "act",
        "act_1",
        "relu",
    ]


@BOTH
def test_placeholder_without_default_has_no_args(library: Any) -> None:
    graph = library.Graph()
    assert [graph.placeholder("x").args, graph.placeholder("y", default_value=None).args] == [(), (None,)]


@pytest.mark.parametrize(
    ("op", "target", "error", "message"),
    [
        ("call", "x", GraphError, "unknown opcode 'call'; expected one of call_function"),
        ("root", "x", GraphError, "unknown opcode 'root'"),
        ("call_function", "relu", ArgumentTypeError, "must be a callable, got 'relu'"),
        ("call_method", torch.relu, ArgumentTypeError, "must be a string, got <built-in"),
        ("call_module", 3, ArgumentTypeError, "must be a string, got 3"),
    ],
)
def test_node_that_cannot_be_is_refused_and_changes_nothing(
    op: str, target: Any, error: type[Exception], message: str
) -> None:
    graph = chain()
    before = str(graph)
    with pytest.raises(error, match=message):
        graph.create_node(op, target, (graph.root.next,))
    assert str(graph) == before


@pytest.mark.parametrize(("args", "kwargs"), [([1], None), (None, [1]), ("here", 5)])
def test_arguments_of_the_wrong_type_are_refused_and_change_nothing(args: Any, kwargs: Any) -> None:
    graph = chain()
    before = str(graph)
    with pytest.raises(ArgumentTypeError, match="of node 'neg' must be a"):
        graph.call_function(torch.neg, (graph.root.next,) if args == "here" else args, kwargs)
    assert str(graph) == before


def test_node_hidden_where_nobody_looks_is_refused_and_changes_nothing() -> None:
    graph = chain()
    before = str(graph)
    x, relu, *_ = graph.nodes
    for hidden in ({x}, frozenset({x}), {x: 1}):
        with pytest.raises(ArgumentTypeError):
            graph.call_function(torch.cat, (relu, [x, hidden]))
        with pytest.raises(ArgumentTypeError):
            relu.args = (relu, hidden)
    assert str(graph) == before
    graph.lint()


# -- insert points ----------------------------------------------------------------------------------------------------


@BOTH
def test_nodes_go_before_and_after_and_then_to_the_end_again(library: Any) -> None:
    graph = chain(library, 1)
    x, relu, _ = graph.nodes
    with graph.inserting_before(relu):
        graph.call_function(torch.neg, (x,))
        graph.call_function(torch.abs, (x,))
        with graph.inserting_after(relu):
            graph.call_function(torch.sin, (x,))
            graph.call_function(torch.cos, (x,))
        graph.call_function(torch.exp, (x,))
    graph.call_function(torch.tan, (x,))
    assert names(graph.nodes) == ["x", "neg", "abs_1", "exp", "relu", "cos", "sin", "output", "tan"]


@BOTH
def test_without_a_node_the_start_and_the_end_are_meant(library: Any) -> None:
    graph = chain(library, 1)
    with graph.inserting_before():
        graph.placeholder("a")
        graph.placeholder("b")
        with graph.inserting_after():
            graph.placeholder("c")
    assert set(names(graph.nodes)[:2]) == {"a", "b"}
    assert names(graph.nodes)[2:] == ["x", "relu", "output", "c"]


@BOTH
def test_insert_point_outside_a_with_statement_stays(library: Any) -> None:
    graph = chain(library, 1)
    graph.inserting_before(list(graph.nodes)[1])
    graph.call_function(torch.neg)
    graph.call_function(torch.abs)
    assert names(graph.nodes) == ["x", "neg", "abs_1", "relu", "output"]


def test_insert_point_comes_back_when_the_block_raises() -> None:
    graph = chain(length=1)
    with pytest.raises(ZeroDivisionError), graph.inserting_before(graph.root.next):
        raise ZeroDivisionError
    assert graph.placeholder("y") is graph.root.prev


@pytest.mark.parametrize("side", ["inserting_before", "inserting_after"])
def test_insert_point_whose_node_is_erased_stays_at_its_place(side: str) -> None:
    graph = chain(length=1)
    x, relu, output = graph.nodes
    neg = graph.call_function(torch.neg, (x,))
    relu.append(neg)
    with getattr(graph, side)(neg):
        with graph.inserting_before(output):
            graph.erase_node(neg)
        graph.call_function(torch.abs, (x,))
    assert names(graph.nodes) == ["x", "relu", "abs_1", "output"]
    assert names(reversed(graph.nodes)) == ["output", "abs_1", "relu", "x"]


def test_inserting_next_to_a_foreign_or_erased_node_is_refused() -> None:
    graph, other = chain(), chain()
    erased = graph.call_function(torch.neg)
    graph.erase_node(erased)
    for inserting in (graph.inserting_before, graph.inserting_after):
        with pytest.raises(ForeignNodeError, match="node 'x': it belongs to another graph"):
            inserting(other.root.next)
        with pytest.raises(ForeignNodeError, match="node 'neg': it was erased"):
            inserting(erased)
    assert graph.placeholder("y") is graph.root.prev


# -- erasing ----------------------------------------------------------------------------------------------------------


@BOTH
def test_erased_node_is_gone_and_reads_nothing(library: Any) -> None:
    graph = chain(library)
    last = graph.call_function(torch.neg, (list(graph.nodes)[1],), {"k": [list(graph.nodes)[1]]})
    graph.erase_node(last)
    assert (names(graph.nodes), len(graph.nodes)) == (["x", "relu", "relu_1", "relu_2", "output"], 5)
    assert names(list(graph.nodes)[1].users) == ["relu_1"]


@BOTH
def test_erasing_a_node_in_use_is_refused_and_changes_nothing(library: Any) -> None:
    graph = chain(library)
    before = str(graph)
    with pytest.raises(RuntimeError):
        graph.erase_node(list(graph.nodes)[1])
    assert str(graph) == before


def test_error_of_erasing_a_node_in_use_names_its_readers() -> None:
    graph = chain()
    with pytest.raises(NodeInUseError, match=r"'relu': 1 node\(s\) read it \('relu_1'\).*replace_all_uses_with"):
        graph.erase_node(list(graph.nodes)[1])


def test_erasing_a_foreign_node_or_twice_is_refused_and_changes_nothing() -> None:
    graph, other = chain(), chain()
    loose, foreign = graph.call_function(torch.neg), other.call_function(torch.neg)
    graph.erase_node(loose)
    assert loose.is_erased
    for node in (loose, foreign):
        with pytest.raises(ForeignNodeError, match="cannot erase node 'neg'"):
            graph.erase_node(node)
    assert (len(graph.nodes), len(other.nodes)) == (5, 6)
    graph.lint()
    other.lint()


def test_name_of_an_erased_node_is_not_given_out_again() -> None:
    graph = Graph()
    graph.erase_node(graph.call_function(torch.relu))
    assert graph.call_function(torch.relu).name == "relu_1"


# -- finding ----------------------------------------------------------------------------------------------------------


@BOTH
def test_nodes_are_found_by_opcode_and_target_after_every_kind_of_edit(library: Any) -> None:
    graph = chain(library)
    x, relu, relu_1, relu_2, output = graph.nodes

    def found(target: Any) -> list[str]:
        return names(graph.find_nodes(op="call_function", target=target))

    assert found(torch.relu) == ["relu", "relu_1", "relu_2"]
    with graph.inserting_after(x):
        graph.call_function(torch.relu, (x,))
    relu_1.target = torch.neg
    relu_2.append(relu)
    output.args = (x,)
    assert found(torch.relu) == ["relu_3", "relu_2", "relu"]
    assert found(torch.neg) == ["relu_1"]
    graph.erase_node(relu_2)
    relu_1.op, relu_1.target = "call_method", "neg"
    assert (found(torch.relu), found(torch.neg)) == (["relu_3", "relu"], [])
    assert names(graph.find_nodes(op="call_method", target="neg")) == ["relu_1"]
    assert names(graph.find_nodes(op="placeholder")) == ["x"]
    assert graph.find_nodes(op="call_module", target="layer") == []


def test_nodes_found_unsorted_are_the_same_nodes() -> None:
    graph = chain()
    found = graph.find_nodes(op="call_function", target=torch.relu, sort=False)
    assert set(found) == set(graph.find_nodes(op="call_function", target=torch.relu))


def test_erased_node_is_not_found_even_when_it_is_edited_later() -> None:
    graph = Graph()
    node = graph.call_function(torch.relu)
    assert graph.find_nodes(op="call_function", target=torch.relu) == [node]
    graph.erase_node(node)
    node.target = torch.neg
    assert graph.find_nodes(op="call_function", target=torch.neg) == []


def test_finding_functions_needs_a_target() -> None:
    with pytest.raises(GraphError, match="needs the target function as well"):
        Graph().find_nodes(op="call_function")


def test_output_node_of_a_graph_without_one_is_refused() -> None:
    graph = Graph()
    graph.placeholder("x")
    with pytest.raises(GraphError, match=r"no output node at its end; add one with graph.output\(value\)"):
        graph.output_node()


# -- copies -----------------------------------------------------------------------------------------------------------


@BOTH
def test_node_copy_maps_inputs_and_copies_meta(library: Any) -> None:
    graph, other = chain(library), library.Graph()
    y = other.placeholder("y")
    node = list(graph.nodes)[1]
    node.meta["shape"], node.type = (1,), int
    copied = other.node_copy(node, lambda _: y)
    assert (copied.name, copied.target, copied.args, copied.type, copied.meta) == (
        "relu",
        torch.relu,
        (y,),
        int,
        {"shape": (1,)},
    )
    assert copied.meta is not node.meta
    assert copied.graph is other


@BOTH
def test_graph_copy_returns_the_result_in_terms_of_this_graph(library: Any) -> None:
    graph, other = chain(library, 1), library.Graph()
    x, relu, output = graph.nodes
    y = other.placeholder("y")
    places = {x: y}
    result = other.graph_copy(graph, places)
    assert result is places[relu]
    assert names(other.nodes) == ["y", "relu"]
    assert other.graph_copy(graph, {x: y}, return_output_node=True) == (list(other.nodes)[-1], output)


@BOTH
def test_graph_copy_of_a_graph_without_output_returns_none(library: Any) -> None:
    assert library.Graph().graph_copy(library.Graph(), {}) is None


# -- code -------------------------------------------------------------------------------------------------------------


@BOTH
def test_code_transformer_edits_the_body_and_the_earlier_one_comes_back(library: Any) -> None:
    graph = chain(library, 1)
    seen: list[Any] = []

    def register(line: str) -> Any:
        def make(earlier: Any) -> Any:
            seen.append(earlier)
            return lambda body: [line, *(earlier(body) if earlier else body)]

        return make

    graph.on_generate_code(register("first = 1\n"))
    with graph.on_generate_code(register("second = 2\n")):
        lines = graph.python_code("self").src.split("\n")
        assert [line.strip() for line in lines[4:7]] == ["second = 2", "first = 1", "relu = torch.relu(x);  x = None"]
    assert "second" not in graph.python_code("self").src
    assert "first" in graph.python_code("self").src
    assert seen[0] is None
    assert seen[1] is not None


@pytest.mark.slow
def test_owner_is_held_weakly() -> None:
    graph = Graph()
    module = GraphModule(nn.Module(), graph)
    assert graph.owning_module is module
    del module
    gc.collect()
    assert graph.owning_module is None


def test_every_edit_is_counted() -> None:
    graph = chain()
    x, relu, relu_1, relu_2, output = graph.nodes
    edits: list[Callable[[], Any]] = [
        lambda: setattr(relu, "target", torch.neg),
        lambda: setattr(relu, "op", "call_function"),
        lambda: setattr(relu, "args", (x,)),
        lambda: setattr(relu, "kwargs", {}),
        lambda: relu.update_arg(0, x),
        lambda: relu_2.append(output),
        lambda: relu_2.prepend(relu_1),
        lambda: graph.call_function(operator.add),
        lambda: graph.erase_node(graph.root.prev),
        lambda: relu.replace_all_uses_with(x),
        lambda: output.replace_input_with(relu_2, x),
        lambda: graph.on_generate_code(lambda _: lambda body: body),
    ]
    for index, edit in enumerate(edits):
        before = graph.edits
        edit()
        assert graph.edits > before, index


def test_reading_is_no_edit() -> None:
    graph = chain()
    before = graph.edits
    graph.lint()
    copy.deepcopy(graph)
    graph.find_nodes(op="placeholder")
    str(graph)
    graph.python_code("self")
    list(graph.nodes)
    assert graph.edits == before


def test_the_path_of_a_traced_module_is_answered_by_what_is_inside() -> None:
    inner = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    graph = featx.trace(nn.Sequential(inner, nn.Tanh()), torch.rand(3, 2)).graph
    assert all(each in graph for each in ("0.1", "_0_1", graph["0.1"]))
    assert not any(each in graph for each in ("0", 3))
    assert str(graph["0.1"]) == "_0_1"
    with pytest.raises(featx.NodeNameError, match=r"no node '0'.* a module that was traced.*'0.0' to '0.1' are inside"):
        graph["0"]
    with pytest.raises(featx.NodeNameError, match=r"no node '0.3'\. Did you mean"):
        graph["0.3"]


@BOTH
def test_errors_are_of_the_classes_that_torch_fx_raises(library: Any) -> None:
    graph, foreign = library.Graph(), library.Graph().placeholder("x")
    with pytest.raises(AssertionError):
        graph.create_node("call", "x")
    with pytest.raises(AssertionError), graph.inserting_before(foreign):
        pass
    with pytest.raises(RuntimeError):
        graph.erase_node(foreign)
    with pytest.raises(RuntimeError):
        library.GraphModule(3, graph)


@dataclasses.dataclass
class Scale:
    """Has no hash, as dataclasses that compare have none."""

    factor: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


def test_callable_without_a_hash_is_called_like_any_other() -> None:
    graph, twice, thrice = Graph(), Scale(2.0), Scale(3.0)
    x = graph.placeholder("x")
    nodes = [graph.call_function(function, (x,)) for function in (twice, thrice, torch.relu)]
    assert graph.find_nodes(op="call_function", target=twice) == nodes[:1]
    nodes[2].target = twice
    assert graph.find_nodes(op="call_function", target=twice) == [nodes[0], nodes[2]]
    graph.output(tuple(nodes))
    module = GraphModule(nn.Module(), graph)
    for each in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        each.graph.eliminate_dead_code()
        assert each(torch.ones(1)) == (2.0, 3.0, 2.0)
        assert featx.Interpreter(each).run(torch.ones(1)) == (2.0, 3.0, 2.0)
    assert names(nodes) == ["scale", "scale_1", "relu"]


def test_callable_without_a_hash_processes_features_and_edits_values() -> None:
    net, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval(), torch.rand(2, 4)
    wanted: Any = {"0": featx.Feature("a", apply=Scale(2.0)), "1": "b"}
    found = featx.create_feature_extractor(net, wanted, edits={"0": Scale(3.0)}, example_inputs=x)(x)
    assert torch.equal(found["a"], net[0](x) * 3.0 * 2.0)
    assert torch.equal(found["b"], net[1](net[0](x) * 3.0))


def test_refused_node_takes_no_name() -> None:
    graph = chain(length=0)
    with pytest.raises(ArgumentTypeError):
        graph.call_function(torch.relu, ("x",), ["no dict"])  # type: ignore[arg-type]
    assert graph.call_function(torch.relu).name == "relu"
