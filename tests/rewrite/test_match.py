"""SubgraphMatcher finds what torch.fx's finds, and what its users wished for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peer import matched_alike
from torch import nn
from torch.nn import functional

import featx
from featx.rewrite.match import InternalMatch, SubgraphMatcherWithNameNodeMap


def four_relus(x: Any) -> Any:
    for _ in range(4):
        x = torch.relu(x)
    return x


def two_relus(x: Any) -> Any:
    return torch.relu(torch.relu(x))


def test_back_to_back_matches_do_not_overlap() -> None:
    found = matched_alike(four_relus, two_relus)
    assert found == [
        {"relu_1": "relu_1", "relu": "relu", "x": "x"},
        {"relu_1": "relu_3", "relu": "relu_2", "x": "relu_1"},
    ]


def test_overlapping_matches_are_kept_on_request() -> None:
    assert len(matched_alike(four_relus, two_relus, remove_overlapping_matches=False)) == 3


def test_pattern_that_must_end_where_the_graph_ends_is_found_there_only() -> None:
    found = matched_alike(four_relus, two_relus, match_output=True)
    assert found == [{"output": "output", "relu_1": "relu_3", "relu": "relu_2", "x": "relu_1"}]


def test_pattern_that_must_start_where_the_graph_starts_is_found_there_only() -> None:
    found = matched_alike(four_relus, two_relus, match_placeholder=True)
    assert [match["x"] for match in found] == ["x"]


def test_inner_value_that_others_read_rules_a_match_out() -> None:
    def leaks(x: Any) -> Any:
        inner = torch.relu(x)
        return torch.relu(inner) + inner

    assert matched_alike(leaks, two_relus) == []


def test_returned_value_may_have_other_readers() -> None:
    def read_twice(x: Any) -> Any:
        outer = torch.relu(torch.relu(x))
        return torch.neg(outer) - outer

    assert len(matched_alike(read_twice, two_relus)) == 1


def test_two_inputs_never_stand_for_one_node() -> None:
    assert matched_alike(lambda x: torch.add(x, x), lambda x, y: torch.add(x, y)) == []


def test_one_input_read_twice_stands_for_one_node() -> None:
    def model(x: Any, y: Any) -> Any:
        return torch.add(x, y) + torch.add(y, y)

    assert [match["x"] for match in matched_alike(model, lambda x: torch.add(x, x))] == ["y"]


@pytest.mark.parametrize("argument", [2, 2.0, None, [1, 2], (1, 2), "mean"])
def test_input_stands_for_a_constant(argument: Any) -> None:
    def model(x: Any) -> Any:
        return x.cumsum(argument)

    assert len(matched_alike(model, lambda x, dim: x.cumsum(dim))) == 1


def test_input_that_is_used_twice_stands_for_one_constant() -> None:
    def model(x: Any) -> Any:
        return x.add(2).mul(2) + x.add(2).mul(3)

    assert [match["number"] for match in matched_alike(model, lambda x, number: x.add(number).mul(number))] == ["2"]


@pytest.mark.parametrize(("number", "matches"), [(2, 1), (2.0, 0), (True, 0), (3, 0)])
def test_constants_match_by_type_and_value(number: Any, matches: int) -> None:
    assert len(matched_alike(lambda x: x.add(2), lambda x: x.add(number))) == matches


def test_constants_are_ignored_on_request() -> None:
    assert len(matched_alike(lambda x: x.add(2), lambda x: x.add(3), ignore_literals=True)) == 1


def test_constant_of_the_pattern_matches_a_node_where_constants_are_ignored() -> None:
    assert len(matched_alike(lambda x, y: x.add(y), lambda x: x.add(3), ignore_literals=True)) == 1


def test_operation_never_matches_a_constant_even_where_constants_are_ignored() -> None:
    graph = featx.symbolic_trace(lambda x: torch.add(x, 2)).graph
    matcher = featx.SubgraphMatcher(lambda x, y: torch.add(x, torch.relu(y)), ignore_literals=True)
    assert matcher.match(graph) == []  # torch.fx finds a match without the relu


def test_node_matches_an_output_by_a_part_of_its_name() -> None:
    found = matched_alike(lambda x: torch.sigmoid(torch.relu(x)), lambda x: torch.neg(torch.relu(x)), name="sigm")
    assert [match["neg"] for match in found] == ["sigmoid"]


def test_lists_and_tuples_match_item_by_item() -> None:
    def model(x: Any, y: Any) -> Any:
        return torch.cat([x, torch.relu(y)]), torch.cat((x, y)), torch.cat([x, y, x])

    assert len(matched_alike(model, lambda x, y: torch.cat([x, y]))) == 2
    assert len(matched_alike(model, lambda x, y: torch.cat([x, torch.relu(y)]))) == 1


def test_slices_with_nodes_match_item_by_item() -> None:
    def model(x: Any, size: Any) -> Any:
        return x[1 : size.sum()], x[2 : size.sum()]

    found = featx.SubgraphMatcher(lambda x, end: x[1:end]).match(featx.symbolic_trace(model).graph)
    assert [str(match.nodes_map) for match in found] == ["{getitem: getitem, x: x, end: sum_1}"]


@pytest.mark.parametrize(
    "model",
    [
        lambda x: functional.softmax(x, 1),
        lambda x: functional.softmax(x, dim=1),
        lambda x: functional.softmax(input=x, dim=1, dtype=None),
    ],
)
def test_arguments_match_by_position_and_by_name(model: Any) -> None:
    assert len(featx.SubgraphMatcher(lambda x: functional.softmax(x, 1)).match(featx.symbolic_trace(model).graph)) == 1


def test_commutative_operands_are_exchanged_on_request() -> None:
    graph = featx.symbolic_trace(lambda x, y: torch.add(y, torch.relu(x)) + torch.relu(y).sub(x)).graph
    pattern = featx.symbolic_trace(lambda x, y: torch.add(torch.relu(x), y)).graph
    assert featx.SubgraphMatcher(pattern).match(graph) == []
    (match,) = featx.SubgraphMatcher(pattern, commutative=True).match(graph)
    assert str(match.nodes_map) == "{add: add, relu: relu, x: x, y: y}"


def test_match_has_the_fields_of_torch_fx() -> None:
    graph = featx.symbolic_trace(lambda x, y: torch.sub(torch.relu(x), y)).graph
    matcher = featx.SubgraphMatcher(lambda a, b: torch.sub(torch.relu(a), b))
    (match,) = matcher.match(graph)
    assert isinstance(match, InternalMatch)
    assert (
        match.anchors
        == matcher.pattern_anchors
        == list(matcher.pattern.find_nodes(op="call_function", target=torch.sub))
    )
    assert [str(node) for node in match.placeholder_nodes] == ["x", "y"]
    assert [str(node) for node in match.returning_nodes] == ["sub"]
    assert match.name_node_map == {}


def test_named_nodes_of_a_pattern_are_found() -> None:
    def pattern(x: Any) -> Any:
        inner = torch.sigmoid(x)
        return torch.relu(inner), {"inner": inner}

    given = featx.symbolic_trace(pattern)
    before = str(given.graph)
    matcher = SubgraphMatcherWithNameNodeMap(given)
    (match,) = matcher.match(featx.symbolic_trace(lambda x: torch.relu(torch.sigmoid(x)) + 1).graph)
    assert str(match.name_node_map) == "{'inner': sigmoid}"
    assert str(given.graph) == before


@pytest.mark.parametrize("result", [lambda x: x, lambda x: (x, x), lambda x: (x, {"x": 1}), lambda x: {"x": x}])
def test_pattern_without_names_is_refused_where_names_are_needed(result: Any) -> None:
    with pytest.raises(featx.PatternError, match="a dict from names to nodes"):
        SubgraphMatcherWithNameNodeMap(lambda x: result(torch.relu(x)))


def test_guards_of_a_traced_pattern_are_not_looked_for() -> None:
    class Halved(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(x)[: x.shape[0] // 2] if x.shape[0] % 2 == 0 else torch.relu(x)

    pattern = featx.trace(Halved(), torch.ones(4))
    assert any(node.meta.get("is_guard") for node in pattern.graph.nodes)
    before = str(pattern.graph)
    graph = featx.symbolic_trace(lambda x: torch.relu(x)[: x.shape[0] // 2]).graph
    assert len(featx.SubgraphMatcher(pattern).match(graph)) == 1
    assert str(pattern.graph) == before


def test_matching_changes_nothing() -> None:
    module = featx.symbolic_trace(four_relus)
    edits, text = module.graph.edits, str(module.graph)
    featx.SubgraphMatcher(two_relus).match(module.graph)
    assert (module.graph.edits, str(module.graph)) == (edits, text)
