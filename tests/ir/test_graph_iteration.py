from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx

import featx

# What both libraries mean alike is asserted of both: torch.fx says that the expectation is right.
BOTH = pytest.mark.parametrize("library", [featx, torch.fx], ids=["featx", "torch.fx"])


def names(nodes: Any) -> list[str]:
    return [node.name for node in nodes]


def visit(graph: Any, edit: Callable[[Any], None], backwards: bool = False) -> list[str]:
    visited: list[str] = []
    for node in reversed(graph.nodes) if backwards else graph.nodes:
        visited.append(node.name)
        assert len(visited) < 20, "the iteration does not end"
        edit(node)
    return visited


def loose(library: Any) -> Any:
    """Return a graph of nodes a, b, c, d that read nothing."""
    graph = library.Graph()
    for name in "abcd":
        graph.create_node("call_function", torch.rand, name=name)
    return graph


@BOTH
@pytest.mark.parametrize("backwards", [False, True])
def test_current_node_may_be_erased(library: Any, backwards: bool) -> None:
    graph = loose(library)
    assert visit(graph, graph.erase_node, backwards) == (["d", "c", "b", "a"] if backwards else ["a", "b", "c", "d"])
    assert len(graph.nodes) == 0


@BOTH
def test_next_node_may_be_erased_and_is_passed_over(library: Any) -> None:
    graph = loose(library)
    assert visit(graph, lambda node: graph.erase_node(node.next) if node.name in "ac" else None) == ["a", "c"]


def test_current_node_and_those_around_it_may_be_erased_at_once() -> None:
    graph = loose(featx)

    def erase(node: Any) -> None:
        if node.name == "b":
            for gone in (node.next, node, node.prev):
                graph.erase_node(gone)

    assert visit(graph, erase) == ["a", "b", "d"]
    assert names(graph.nodes) == ["d"]


@BOTH
@pytest.mark.parametrize("backwards", [False, True])
def test_current_node_and_then_the_one_that_follows_may_be_erased(library: Any, backwards: bool) -> None:
    graph = loose(library)

    def erase(node: Any) -> None:
        if node.name == ("c" if backwards else "b"):
            following = node.prev if backwards else node.next
            graph.erase_node(node)
            graph.erase_node(following)

    assert visit(graph, erase, backwards) == (["d", "c", "a"] if backwards else ["a", "b", "d"])


@BOTH
def test_node_inserted_behind_the_current_one_is_visited(library: Any) -> None:
    graph = loose(library)

    def insert(node: Any) -> None:
        if node.name == "b":
            with graph.inserting_after(node):
                graph.create_node("call_function", torch.rand, name="new")

    assert visit(graph, insert) == ["a", "b", "new", "c", "d"]


@BOTH
def test_node_inserted_before_the_current_one_is_not_visited(library: Any) -> None:
    graph = loose(library)

    def insert(node: Any) -> None:
        with graph.inserting_before(node):
            graph.create_node("call_function", torch.rand, name="new")

    assert visit(graph, insert) == ["a", "b", "c", "d"]
    assert len(graph.nodes) == 8


@BOTH
def test_node_that_moves_is_visited_where_the_iteration_meets_it(library: Any) -> None:
    graph = loose(library)
    a, _, c, d = graph.nodes
    assert visit(graph, lambda node: d.append(c) if node is a else None) == ["a", "b", "d", "c"]


@BOTH
def test_two_iterations_of_one_graph_do_not_disturb_each_other(library: Any) -> None:
    graph = loose(library)
    assert len([1 for _ in graph.nodes for _ in graph.nodes]) == 16
