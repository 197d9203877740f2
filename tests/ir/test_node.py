from __future__ import annotations

import copy
import operator
from typing import Any, NamedTuple

import pytest
import torch
import torch.fx

import featx
from featx import Graph, Node
from featx.errors import ArgumentTypeError, ForeignNodeError, GraphError
from featx.ir.arguments import map_aggregate, map_arg

# What both libraries mean alike is asserted of both: torch.fx says that the expectation is right.
BOTH = pytest.mark.parametrize("library", [featx, torch.fx], ids=["featx", "torch.fx"])


class Pair(NamedTuple):
    left: Any
    right: Any


def chain(library: Any = featx, length: int = 3) -> list[Any]:
    """Return the nodes of x -> relu -> relu_1 ... -> output."""
    graph = library.Graph()
    value = graph.placeholder("x")
    for _ in range(length):
        value = graph.call_function(torch.relu, (value,))
    graph.output(value)
    return list(graph.nodes)


def names(nodes: Any) -> list[str]:
    return [node.name for node in nodes]


# -- what a node reads and who reads it -------------------------------------------------------------------------------


@BOTH
def test_inputs_are_found_in_nested_arguments_each_once_in_order(library: Any) -> None:
    graph = library.Graph()
    a, b, c, d = [graph.placeholder(name) for name in "abcd"]
    node = graph.call_function(torch.cat, ([b, (a, b)],), {"k": {"v": c}, "s": slice(d, None, a)})
    assert names(node.all_input_nodes) == ["b", "a", "c", "d"]
    assert [names(source.users) for source in (a, b, c, d)] == [["cat"]] * 4


@BOTH
def test_users_come_in_the_order_in_which_they_were_made(library: Any) -> None:
    graph = library.Graph()
    x = graph.placeholder("x")
    first, second = graph.call_function(torch.relu, (x,)), graph.call_function(torch.neg, (x,))
    second.args = (x,)
    assert list(x.users) == [first, second]


@BOTH
def test_assigning_args_moves_the_uses(library: Any) -> None:
    graph = library.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    node = graph.call_function(torch.add, (a, a), {"alpha": a})
    node.args = (b, 1)
    assert (names(a.users), names(b.users)) == (["add"], ["add"])
    node.kwargs = {}
    assert (names(a.users), names(b.users)) == ([], ["add"])
    assert (node.args, node.kwargs) == ((b, 1), {})


@BOTH
def test_update_arg_replaces_one_argument(library: Any) -> None:
    x, relu, *_ = chain(library)
    relu.update_arg(0, 3)
    assert (relu.args, names(x.users)) == ((3,), [])


@BOTH
def test_insert_arg_puts_one_argument_before_another(library: Any) -> None:
    x, relu, relu_1, *_ = chain(library)
    relu_1.insert_arg(0, x)
    relu_1.insert_arg(2, 5)
    assert relu_1.args == (x, relu, 5)
    assert names(x.users) == ["relu", "relu_1"]


@BOTH
def test_update_kwarg_sets_one_keyword(library: Any) -> None:
    x, relu, *_ = chain(library)
    relu.update_kwarg("out", x)
    relu.update_kwarg("alpha", 2)
    assert relu.kwargs == {"out": x, "alpha": 2}


def test_insert_arg_outside_the_arguments_is_refused() -> None:
    x, relu, *_ = chain()
    with pytest.raises(GraphError, match="'relu' has 1 arguments; cannot insert one at 2"):
        relu.insert_arg(2, x)
    assert relu.args == (x,)


@pytest.mark.parametrize(("attribute", "value"), [("args", {1}), ("args", None), ("kwargs", [("a", 1)])])
def test_arguments_of_the_wrong_type_are_refused_and_change_nothing(attribute: str, value: Any) -> None:
    x, relu, *_ = chain()
    with pytest.raises(ArgumentTypeError, match=f"{attribute} of node 'relu' must be a"):
        setattr(relu, attribute, value)
    assert (relu.args, relu.kwargs, names(x.users)) == ((x,), {}, ["relu"])


@BOTH
def test_list_may_be_assigned_as_arguments(library: Any) -> None:
    x, relu, *_ = chain(library)
    relu.args = [x, [x]]
    assert list(relu.args) == [x, [x]]
    assert names(x.users) == ["relu"]


@BOTH
def test_op_target_and_attributes_of_ones_own_may_be_set(library: Any) -> None:
    _, relu, *_ = chain(library)
    relu.op, relu.target = "call_method", "neg"
    relu.shape = (1, 2)
    assert (relu.op, relu.target, relu.shape, relu.meta) == ("call_method", "neg", (1, 2), {})


def test_unknown_opcode_is_refused_and_changes_nothing() -> None:
    _, relu, *_ = chain()
    with pytest.raises(GraphError, match="'relu': unknown opcode 'call'; expected one of call_function"):
        relu.op = "call"
    assert relu.op == "call_function"


@BOTH
def test_stack_trace_is_kept_in_meta(library: Any) -> None:
    x, *_ = chain(library)
    assert x.stack_trace is None
    x.stack_trace = "model.py:3"
    assert (x.stack_trace, x.meta) == ("model.py:3", {"stack_trace": "model.py:3"})


# -- place ------------------------------------------------------------------------------------------------------------


@BOTH
def test_next_and_prev_lead_through_the_graph_and_around(library: Any) -> None:
    nodes = chain(library)
    assert [node.next for node in nodes[:-1]] == nodes[1:]
    assert [node.prev for node in nodes[1:]] == nodes[:-1]
    assert nodes[-1].next.op == nodes[0].prev.op == "root"


@BOTH
def test_prepend_moves_a_node_to_just_before(library: Any) -> None:
    nodes = chain(library)
    nodes[1].prepend(nodes[3])
    assert names(nodes[0].graph.nodes) == ["x", "relu_2", "relu", "relu_1", "output"]


@BOTH
def test_append_moves_a_node_to_just_after(library: Any) -> None:
    nodes = chain(library)
    nodes[2].append(nodes[0])
    assert names(nodes[0].graph.nodes) == ["relu", "relu_1", "x", "relu_2", "output"]


@pytest.mark.parametrize("move", [Node.prepend, Node.append])
@pytest.mark.parametrize("position", range(5))
def test_moving_a_node_next_to_a_neighbour_or_itself_keeps_the_list_whole(move: Any, position: int) -> None:
    nodes = chain()
    move(nodes[2], nodes[position])
    expected = [node for node in nodes if node is not nodes[position] or position == 2]
    if position != 2:
        expected.insert(expected.index(nodes[2]) + (move is Node.append), nodes[position])
    assert list(nodes[0].graph.nodes) == expected
    assert list(reversed(nodes[0].graph.nodes)) == expected[::-1]


def test_moving_a_foreign_node_is_refused_and_changes_nothing() -> None:
    nodes, others = chain(), chain()
    for move in (nodes[1].prepend, nodes[1].append):
        with pytest.raises(ForeignNodeError, match=r"'x' is not in the graph of node 'relu'; .*node_copy"):
            move(others[0])
    assert list(nodes[0].graph.nodes) == nodes
    assert list(others[0].graph.nodes) == others


def test_moving_an_erased_node_or_next_to_one_is_refused() -> None:
    nodes = chain()
    unused = nodes[0].graph.call_function(torch.neg, (nodes[0],))
    nodes[0].graph.erase_node(unused)
    for move in (lambda: nodes[0].append(unused), lambda: unused.append(nodes[0])):
        with pytest.raises(ForeignNodeError):
            move()
    assert list(nodes[0].graph.nodes) == nodes


# -- edits ------------------------------------------------------------------------------------------------------------


@BOTH
def test_replace_all_uses_with_changes_every_user_and_returns_them(library: Any) -> None:
    graph = library.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    users = [graph.call_function(torch.add, (x, [x]), {"other": x}), graph.output(x)]
    assert x.replace_all_uses_with(y) == users
    assert users[0].args == (y, [y])
    assert users[0].kwargs == {"other": y}
    assert (list(x.users), list(y.users)) == ([], users)


def test_replace_all_uses_with_leaves_the_replacement_itself_alone() -> None:
    # torch.fx makes the wrapper read itself here: `neg = torch.neg(neg)`.
    graph = Graph()
    x = graph.placeholder("x")
    output = graph.output(x)
    with graph.inserting_after(x):
        wrapper = graph.call_function(torch.neg, (x,))
    assert x.replace_all_uses_with(wrapper) == [output]
    assert (wrapper.args, output.args) == ((x,), (wrapper,))
    graph.lint()


@BOTH
def test_replace_all_uses_with_changes_only_the_users_that_the_callback_picks(library: Any) -> None:
    graph = library.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    kept, changed = graph.call_function(torch.relu, (x,)), graph.call_function(torch.neg, (x,))
    assert x.replace_all_uses_with(y, lambda user: user.target is torch.neg) == [changed]
    assert (kept.args, changed.args) == ((x,), (y,))


@BOTH
def test_replace_all_uses_with_copies_meta_when_asked(library: Any) -> None:
    x, relu, *_ = chain(library)
    relu.meta["shape"] = (1,)
    relu.replace_all_uses_with(x, propagate_meta=True)
    assert x.meta == {"shape": (1,)}
    assert x.meta is not relu.meta


def test_replacement_with_meta_of_its_own_refuses_another() -> None:
    x, relu, relu_1, *_ = chain()
    x.meta["shape"] = (1,)
    with pytest.raises(GraphError, match="'x' has meta of its own; pass propagate_meta=False"):
        relu.replace_all_uses_with(x, propagate_meta=True)
    assert relu_1.args == (relu,)


def test_replacement_of_another_graph_is_refused_and_changes_nothing() -> None:
    x, relu, *_ = chain()
    foreign = chain()[0]
    for replace in (lambda: x.replace_all_uses_with(foreign), lambda: relu.replace_input_with(x, foreign)):
        with pytest.raises(ForeignNodeError, match="'x' is not in the graph of node"):
            replace()
    assert (relu.args, list(x.users)) == ((x,), [relu])
    assert names(foreign.users) == ["relu"]


@BOTH
def test_replace_input_with_changes_one_reader_wherever_it_reads(library: Any) -> None:
    graph = library.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    node, other = graph.call_function(torch.add, (x, (x, y)), {"k": [x]}), graph.call_function(torch.relu, (x,))
    node.replace_input_with(x, y)
    assert (node.args, node.kwargs, other.args) == ((y, (y, y)), {"k": [y]}, (x,))
    assert (names(x.users), names(y.users)) == (["relu"], ["add"])


@BOTH
def test_placeholders_outputs_and_writers_are_impure(library: Any) -> None:
    graph = library.Graph()
    x = graph.placeholder("x")
    relu, draw = graph.call_function(torch.relu, (x,)), graph.call_function(torch.rand, (3,))
    check, output = graph.call_function(torch._assert, (x, "")), graph.output(relu)
    assert [node.is_impure() for node in (x, relu, draw, check, output)] == [True, False, True, True, True]


def test_random_draw_is_pure_where_draws_do_not_count() -> None:
    assert not Graph().call_function(torch.rand, (3,)).is_impure(impure_random=False)


def test_method_that_writes_is_impure() -> None:
    # torch.fx calls it pure, and drops it.
    graph = Graph()
    assert graph.call_method("add_", (graph.placeholder("x"), 1)).is_impure()


# -- text and copies --------------------------------------------------------------------------------------------------


@BOTH
def test_node_prints_as_its_name(library: Any) -> None:
    assert [f"{node} {node!r}" for node in chain(library, 1)] == ["x x", "relu relu", "output output"]


@BOTH
def test_node_describes_itself_in_one_line(library: Any) -> None:
    graph = library.Graph()
    x = graph.placeholder("x", type_expr=int, default_value=3)
    node = graph.create_node("call_function", operator.add, (x, [1, (x,)]), {"k": {"a": x}}, type_expr=str)
    output = graph.output(node)
    assert [x.format_node(), node.format_node(), output.format_node()] == [
        "%x : int [num_users=1] = placeholder[target=x](default=3)",
        "%add : str [num_users=1] = call_function[target=operator.add](args = (%x, [1, (%x,)]), kwargs = {k: {a: %x}})",
        "return add",
    ]


def test_deepcopy_of_a_node_alone_is_the_node_itself() -> None:
    # As an argument of a new node, which torch.fx's users write; on torch.fx it is a node of nowhere.
    _, relu, *_ = chain()
    assert copy.deepcopy(relu) is relu


# -- map_arg and map_aggregate ----------------------------------------------------------------------------------------


@BOTH
def test_map_arg_applies_to_nodes_only_and_keeps_structure(library: Any) -> None:
    x = library.Graph().placeholder("x")
    value = (x, [1, x], {"k": slice(x, 2, None)}, Pair(x, "s"), 5)
    apply = torch.fx.node.map_arg if library is torch.fx else map_arg
    mapped = apply(value, str)
    assert mapped == ("x", [1, "x"], {"k": slice("x", 2, None)}, Pair("x", "s"), 5)
    assert type(mapped[3]) is Pair


@BOTH
def test_map_aggregate_applies_to_every_leaf(library: Any) -> None:
    apply = torch.fx.node.map_aggregate if library is torch.fx else map_aggregate
    assert apply((1, [2, {"k": slice(3, None, 4)}], Pair(5, None)), str) == (
        "1",
        ["2", {"k": slice("3", "None", "4")}],
        Pair("5", "None"),
    )
