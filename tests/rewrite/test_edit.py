"""What the graph looks like after a replacement: readers, meta, and nodes that are gone."""

from __future__ import annotations

from typing import Any

import torch
from peer import absolute, neg_relu, x
from torch import nn

import featx
from featx.ir.effects import Effects, MeasuredEffects


class Block(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return neg_relu(x) + 1


def square_root(x: Any) -> Any:
    return torch.sqrt(torch.mul(x, x))


def test_meta_of_what_was_replaced_is_carried_over() -> None:
    """https://github.com/pytorch/pytorch/issues/187945"""
    module = featx.trace(nn.Sequential(Block()), torch.ones(3))
    (old,) = module.graph.find_nodes(op="call_function", target=torch.neg)
    old.meta["mine"] = "kept"
    before = dict(old.meta)
    featx.replace_pattern(module, neg_relu, square_root)
    (new,) = module.graph.find_nodes(op="call_function", target=torch.sqrt)
    for key in ("qualified_name", "nn_module_stack", "source", "shape", "dtype", "mine"):
        assert new.meta[key] == before[key]
    assert new.meta["qualified_name"] == "0.neg"
    (inner,) = module.graph.find_nodes(op="call_function", target=torch.mul)
    assert inner.meta["nn_module_stack"] == before["nn_module_stack"]
    assert inner.meta["source"] == before["source"]
    assert "qualified_name" not in inner.meta
    assert "shape" not in inner.meta


def test_paths_of_the_replacements_own_module_do_not_show() -> None:
    module = featx.symbolic_trace(neg_relu)
    for node in module.graph.nodes:
        node.meta.clear()
    featx.replace_pattern(module, neg_relu, nn.Sequential(nn.Tanh()))
    (new,) = module.graph.find_nodes(op="call_module")
    assert not new.meta


def test_meta_that_the_replacement_gives_itself_is_kept() -> None:
    replacement = featx.symbolic_trace(absolute)
    replacement.graph.find_nodes(op="call_function", target=torch.abs)[0].meta["mine"] = "new"
    module = featx.symbolic_trace(neg_relu)
    module.graph.find_nodes(op="call_function", target=torch.neg)[0].meta["mine"] = "old"
    featx.replace_pattern(module, neg_relu, replacement)
    assert module.graph.find_nodes(op="call_function", target=torch.abs)[0].meta["mine"] == "new"


def test_each_new_node_takes_over_from_the_output_that_it_serves() -> None:
    module = featx.symbolic_trace(lambda x: torch.sigmoid(x) + torch.relu(x))
    for node in module.graph.nodes:
        node.meta["source"] = node.name

    def replacement(x: Any) -> Any:
        return torch.exp(torch.sin(x)), torch.abs(torch.cos(x))

    featx.replace_pattern(module, lambda x: (torch.sigmoid(x), torch.relu(x)), replacement)
    sources = {node.name: node.meta.get("source") for node in module.graph.nodes if node.op == "call_function"}
    assert sources == {"sin": "sigmoid", "exp": "sigmoid", "cos": "relu", "abs_1": "relu", "add": "add"}


def test_input_that_takes_the_place_of_a_result_keeps_its_own_meta() -> None:
    module = featx.symbolic_trace(lambda x: torch.sigmoid(torch.relu(x)))
    (inner,) = module.graph.find_nodes(op="call_function", target=torch.relu)
    before = dict(inner.meta)
    featx.replace_pattern(module, lambda x: torch.sigmoid(x), lambda x: x)
    assert inner.meta == before


def test_guards_and_measured_effects_are_not_carried_over() -> None:
    module = featx.symbolic_trace(neg_relu)
    (old,) = module.graph.find_nodes(op="call_function", target=torch.neg)
    old.meta.update(effects=MeasuredEffects(shares=(0,)), is_guard=True, is_overwritten=False)
    featx.replace_pattern(module, neg_relu, absolute)
    (new,) = module.graph.find_nodes(op="call_function", target=torch.abs)
    assert not new.meta.keys() & {"effects", "is_guard", "is_overwritten"}


def test_what_a_tracer_has_seen_of_later_writes_is_forgotten() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return torch.abs(neg_relu(x + 1))

    module = featx.trace(model, torch.ones(3))
    assert any("is_overwritten" in node.meta for node in module.graph.nodes)
    featx.replace_pattern(module, neg_relu, lambda x: x.mul_(x).neg_())
    assert not any("is_overwritten" in node.meta for node in module.graph.nodes)


def test_measured_effects_follow_the_inputs_that_are_left() -> None:
    graph = featx.Graph()
    first, second = graph.placeholder("first"), graph.placeholder("second")
    one, other = graph.call_function(torch.relu, (first,)), graph.call_function(torch.neg, (second,))
    reader = graph.call_function(torch.addcmul, (one, other, second))
    reader.meta["effects"] = MeasuredEffects(writes=(0,), shares=(1,))
    graph.output(reader)
    module = featx.GraphModule(nn.Module(), graph)
    assert featx.replace_pattern(module, lambda x: torch.relu(x), lambda x: 0.0)
    assert reader.args == (0.0, other, second)
    assert (Effects(graph).of(reader).writes, Effects(graph).of(reader).shares) == ((), (other,))


def test_measured_effects_stay_where_inputs_stay_apart() -> None:
    module = featx.symbolic_trace(lambda x, y: torch.relu(x) * torch.relu(y))
    (reader,) = [node for node in module.graph.nodes if node.name == "mul"]
    reader.meta["effects"] = MeasuredEffects(shares=(1,))
    featx.replace_pattern(module, lambda x: torch.relu(x), absolute)
    assert Effects(module.graph).of(reader).shares == (reader.args[1],)


def test_reader_of_many_results_is_changed_once() -> None:
    graph = featx.Graph()
    value = graph.placeholder("x")
    results = [graph.call_function(torch.relu, (value,)) for _ in range(50)]
    graph.output({"all": results, "slice": slice(results[0], None), "twice": (results[0], results[0])})
    module = featx.GraphModule(nn.Module(), graph)
    edits = graph.edits
    assert len(featx.replace_pattern(module, lambda x: torch.relu(x), absolute)) == 50
    assert {node.target for node in module.graph.output_node().all_input_nodes} == {torch.abs}
    # Fifty nodes made (two edits each: the node and its place), fifty erased, one reader changed.
    assert graph.edits - edits <= 50 * 2 + 50 * 2 + 2
    assert torch.equal(module(x)["all"][7], torch.abs(x))


def test_what_was_replaced_is_erased_and_what_its_inputs_are_is_not() -> None:
    module = featx.symbolic_trace(lambda x: neg_relu(neg_relu(x)))
    found = featx.replace_pattern(module, neg_relu, absolute)
    for match in found:
        *operations, given = match.nodes_map.values()
        assert all(node.is_erased for node in operations)
        assert not given.is_erased
    assert len(module.graph.nodes) == 4


def test_insert_point_of_the_graph_stays_where_it_was() -> None:
    module = featx.symbolic_trace(neg_relu)
    (first,) = module.graph.find_nodes(op="call_function", target=torch.relu)
    with module.graph.inserting_before(first):
        featx.replace_pattern(module, neg_relu, absolute)
        node = module.graph.call_function(torch.sin, (next(iter(module.graph.nodes)),))
    assert [other.name for other in module.graph.nodes].index(node.name) in (1, 2)
    module.graph.lint()
