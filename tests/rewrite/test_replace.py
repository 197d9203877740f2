"""replace_pattern_with_filters: filters and callbacks as in torch.fx; where torch.fx fails, what is right."""

from __future__ import annotations

import copy
import re
from typing import Any

import torch
import torch.fx
from peer import absolute, neg_relu, negative, nodes_of, relu, x, y, z

import featx


def product(x: Any, other: Any) -> Any:
    return torch.mul(x, other)


def adds(x: Any, y: Any) -> Any:
    return torch.add(torch.relu(torch.add(x, 2)), torch.relu(y))


def test_filters_choose_among_matches_as_in_torch_fx() -> None:
    def is_constant(match: Any, graph: Any, pattern: Any) -> bool:
        placeholders = [node for node in pattern.nodes if node.op == "placeholder"]
        assert all(
            match.nodes_map[node] is value for node, value in zip(placeholders, match.placeholder_nodes, strict=True)
        )
        return not hasattr(match.placeholder_nodes[1], "op")

    def pattern(x: Any, other: Any) -> Any:
        return torch.add(x, other)

    ours, peers = featx.symbolic_trace(adds), torch.fx.symbolic_trace(adds)
    (found,) = featx.replace_pattern_with_filters(ours, pattern, product, [is_constant])
    (expected,) = torch.fx.subgraph_rewriter.replace_pattern_with_filters(peers, pattern, product, [is_constant])
    assert nodes_of(ours) == nodes_of(peers)
    assert [str(node) for node in found.replacements] == [str(node) for node in expected.replacements] == ["mul"]
    assert str(found.nodes_map) == str(expected.nodes_map)
    assert torch.equal(ours(x, y), torch.add(torch.relu(x * 2), torch.relu(y)))


def test_filters_see_the_graph_and_the_pattern() -> None:
    seen: list[Any] = []
    module, pattern = featx.symbolic_trace(adds), featx.symbolic_trace(relu).graph
    featx.replace_pattern_with_filters(
        module, pattern, absolute, [lambda *arguments: bool(seen.append(arguments))], node_name_match=""
    )
    assert [(graph is module.graph, given is pattern) for _, graph, given in seen] == [(True, True)] * 2


def test_callback_makes_a_replacement_for_each_match() -> None:
    def by_name(match: Any, graph: Any, pattern: Any) -> featx.Graph:
        made = featx.Graph()
        number = len(match.returning_nodes[0].name)
        made.output(made.call_function(torch.mul, (made.placeholder("x"), number)))
        return made

    module = featx.symbolic_trace(adds)
    found = featx.replace_pattern_with_filters(module, relu, replacement_callback=by_name)
    assert [str(match.replacements) for match in found] == ["[mul]", "[mul_1]"]
    assert torch.equal(module(x, y), torch.add((x + 2) * len("relu"), y * len("relu_1")))


def test_callback_comes_before_the_replacement() -> None:
    module = featx.symbolic_trace(relu)
    featx.replace_pattern_with_filters(module, relu, absolute, replacement_callback=lambda *_: negative)
    assert torch.equal(module(x), -x)


def test_names_find_what_the_pattern_does_not() -> None:
    module = featx.symbolic_trace(lambda x: torch.sigmoid(torch.relu(x)))
    found = featx.replace_pattern_with_filters(module, neg_relu, absolute, node_name_match="sigmoid")
    assert len(found) == 1
    assert torch.equal(module(x), torch.abs(x))


def test_constants_are_ignored_on_request() -> None:
    module = featx.symbolic_trace(lambda x: x.add(2) + x.add(3))
    found = featx.replace_pattern_with_filters(module, lambda x: x.add(1), negative, ignore_literals=True)
    assert len(found) == 2
    assert torch.equal(module(x), -x + -x)


def test_back_to_back_matches_inside_lists_are_wired() -> None:
    """https://github.com/pytorch/pytorch/issues/159613"""

    def model(x: Any, y: Any, z: Any) -> Any:
        return torch.cat([torch.cat([x, y], dim=1), torch.cat([z, z], dim=1)], dim=0)

    def replacement(values: Any, dim: Any) -> Any:
        return torch.concat(values, dim)

    module = featx.symbolic_trace(model)
    found = featx.replace_pattern(module, lambda values, dim: torch.cat(values, dim=dim), replacement)
    assert [str(match.nodes_map) for match in found][2].endswith("values: [concat, concat_1], dim: 0}")
    assert torch.equal(module(x, y, z), model(x, y, z))


def test_matches_say_in_the_end_what_their_inputs_became() -> None:
    def model(x: Any, y: Any) -> Any:
        return torch.relu(torch.sigmoid(y) + torch.relu(torch.sigmoid(x)))

    module = featx.symbolic_trace(model)
    found = featx.replace_pattern(module, lambda x: torch.relu(x), lambda x: torch.clamp_min(x, 0))
    inputs = [list(match.nodes_map.values())[-1] for match in found]
    assert all(node in list(module.graph.nodes) for node in inputs)
    assert torch.equal(module(x, y), model(x, y))


def test_constant_takes_the_place_of_a_node() -> None:
    module = featx.symbolic_trace(lambda x: x * torch.sum(torch.zeros_like(x)))
    featx.replace_pattern(module, lambda x: torch.sum(torch.zeros_like(x)), lambda x: 0.0)
    assert re.search(r"x \* 0\.0", module.code)
    assert torch.equal(module(x), x * 0.0)


def test_input_behind_a_reader_of_the_result_is_moved_up() -> None:
    def model(x: Any, y: Any, z: Any) -> Any:
        first = torch.matmul(x, y).sin()
        return first + torch.matmul(x, z.t()).cos()

    def pattern(x: Any, a: Any, b: Any) -> Any:
        return torch.matmul(x, a), torch.matmul(x, b)

    def replacement(x: Any, a: Any, b: Any) -> Any:
        both = torch.matmul(x, torch.cat([a, b], 1))
        return both[:, :3], both[:, 3:]

    module = featx.symbolic_trace(model)
    assert len(featx.replace_pattern(module, pattern, replacement)) == 1
    torch.testing.assert_close(module(x, y, z), model(x, y, z))


def test_module_runs_the_new_code_without_recompiling() -> None:
    module = featx.symbolic_trace(neg_relu)
    module(x)
    featx.replace_pattern(module, neg_relu, absolute)
    assert torch.equal(module(x), torch.abs(x))
    assert torch.equal(copy.deepcopy(module)(x), torch.abs(x))
