"""What a pattern must be, and how it is prepared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import featx
from featx.rewrite.pattern import Pattern, graph_of


def unused_input(x: Any, y: Any) -> Any:
    return torch.relu(x)


def dead_code(x: Any) -> Any:
    x.add_(1)
    return torch.relu(x)


def returned_input(x: Any, y: Any) -> Any:
    return torch.relu(x), y


REFUSED: list[tuple[Callable[..., Any], str]] = [
    (lambda x: x, "computes nothing, so it would match everything"),
    (lambda x, y: (x, y), r"pattern \(placeholder 'x', placeholder 'y', output 'output'\) computes nothing"),
    (lambda: 3, r"\(output 'output'\) computes nothing"),
    (unused_input, "does not use its input 'y'; remove that input"),
    (dead_code, "no output of the pattern depends on its node 'add_'"),
    (returned_input, "returns its input 'y' and does nothing with it"),
    (lambda x: torch.relu(x) and None, "truth of a traced value"),
]


@pytest.mark.parametrize(("pattern", "message"), REFUSED)
def test_pattern_that_cannot_be_looked_for_is_refused(pattern: Callable[..., Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        featx.SubgraphMatcher(pattern)
    assert isinstance(caught.value, (featx.PatternError, featx.TraceError))


def test_empty_graph_is_refused() -> None:
    with pytest.raises(featx.PatternError, match="an empty graph"):
        featx.SubgraphMatcher(featx.Graph())


def test_graph_without_an_output_is_refused() -> None:
    graph = featx.Graph()
    graph.call_function(torch.relu, (graph.placeholder("x"),))
    with pytest.raises(featx.GraphError, match="no output node"):
        featx.SubgraphMatcher(graph)


def test_anchors_are_the_returned_nodes_that_nothing_else_reads() -> None:
    def pattern(x: Any) -> Any:
        inner = torch.relu(x)
        return inner, torch.neg(inner), torch.abs(inner)

    matcher = featx.SubgraphMatcher(pattern)
    assert [node.name for node in matcher.pattern_returning_nodes] == ["relu", "neg", "abs_1"]
    assert [node.name for node in matcher.pattern_anchors] == ["neg", "abs_1"]
    assert [node.name for node in matcher.pattern_placeholder_nodes] == ["x"]


def test_links_lead_from_what_is_reached_down_to_the_next_anchor() -> None:
    def pattern(x: Any) -> Any:
        inner = torch.relu(x)
        return torch.neg(inner), torch.sigmoid(torch.abs(inner)) + x

    links = Pattern(*graph_of(pattern, "pattern")).links
    assert links[0] == []
    assert [(link.start.name, [node.name for node in link.path]) for link in links[1]] == [
        ("relu", ["abs_1", "sigmoid", "add"]),
        ("x", ["add"]),
    ]
