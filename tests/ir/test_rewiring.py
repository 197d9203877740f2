from __future__ import annotations

import torch

from featx import Graph, Node
from featx.ir.effects import MeasuredEffects
from featx.ir.rewiring import replace_inputs


def call_of_three() -> tuple[Graph, list[Node], Node]:
    graph = Graph()
    inputs = [graph.placeholder(name) for name in "abc"]
    call = graph.call_function(torch.addcmul, (inputs[0], inputs[1]), {"tensor2": [inputs[2], inputs[0]]})
    call.meta["effects"] = MeasuredEffects(writes=(1,), shares=(2, 0))
    return graph, inputs, call


def test_inputs_are_replaced_at_any_depth_and_users_follow() -> None:
    _, (a, b, c), call = call_of_three()
    replace_inputs(call, {a: b, c: 2.0})
    assert call.args == (b, b)
    assert call.kwargs == {"tensor2": [2.0, b]}
    assert (list(a.users), list(b.users), list(c.users)) == ([], [call], [])


def test_node_that_reads_none_of_them_is_not_edited() -> None:
    graph, (a, _, _), call = call_of_three()
    edits, effects = graph.edits, call.meta["effects"]
    replace_inputs(call, {graph.call_function(torch.neg, (a,)): a})
    assert graph.edits == edits + 1  # the new node
    assert call.meta["effects"] is effects


def test_measured_effects_follow_their_inputs() -> None:
    graph, (a, b, c), call = call_of_three()
    new = graph.placeholder("new")
    replace_inputs(call, {a: new})
    assert call.meta["effects"] == MeasuredEffects(writes=(1,), shares=(2, 0))
    # b becomes what c is: the inputs are now [new, c].
    replace_inputs(call, {b: c})
    assert call.all_input_nodes == [new, c]
    assert call.meta["effects"] == MeasuredEffects(writes=(1,), shares=(1, 0))


def test_measured_effects_of_what_became_a_constant_or_several_nodes() -> None:
    _, (a, b, c), call = call_of_three()
    replace_inputs(call, {a: 1.0})
    assert call.meta["effects"] == MeasuredEffects(writes=(0,), shares=(1,))
    replace_inputs(call, {b: [a, c]})
    assert call.all_input_nodes == [a, c]
    assert call.meta["effects"] == MeasuredEffects(writes=(0, 1), shares=(1,))
