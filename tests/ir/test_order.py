from __future__ import annotations

import math
import random
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.fx

import featx
from featx import Graph

# What both libraries mean alike is asserted of both: torch.fx says that the expectation is right.
BOTH = pytest.mark.parametrize("library", [featx, torch.fx], ids=["featx", "torch.fx"])


@BOTH
def test_nodes_compare_by_their_place(library: Any) -> None:
    graph = library.Graph()
    nodes = [graph.placeholder("x") for _ in range(20)]
    shuffled = random.Random(0).sample(nodes, len(nodes))
    assert sorted(shuffled) == nodes
    for first, second in pairwise(nodes):
        assert first < second
        assert first <= second
        assert second > first
        assert second >= first
        assert first <= first
        assert not first < first


@pytest.mark.slow
@pytest.mark.parametrize("place", ["before one node", "after one node", "in the middle", "at the start"])
def test_order_holds_after_ten_thousand_insertions_at_one_place(place: str) -> None:
    graph = Graph()
    first, last = graph.placeholder("a"), graph.placeholder("b")
    expected = [first, last]
    for _ in range(10_000):
        if place == "before one node":
            with graph.inserting_before(last):
                node = graph.call_function(torch.relu)
            expected.insert(-1, node)
        elif place == "after one node":
            with graph.inserting_after(first):
                node = graph.call_function(torch.relu)
            expected.insert(1, node)
        elif place == "at the start":
            with graph.inserting_before():
                node = graph.call_function(torch.relu)
            expected.insert(0, node)
        else:
            index = len(expected) // 2
            with graph.inserting_before(expected[index]):
                node = graph.call_function(torch.relu)
            expected.insert(index, node)
    assert list(graph.nodes) == expected
    assert all(one < other for one, other in pairwise(expected))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_order_equals_that_of_a_list_after_random_insertions_moves_and_erasures(seed: int) -> None:
    choose = random.Random(seed)
    graph = Graph()
    expected = [graph.placeholder("x")]
    for _ in range(3000):
        anchor, action = choose.choice(expected), choose.random()
        index = expected.index(anchor)
        if action < 0.3:
            with graph.inserting_before(anchor):
                expected.insert(index, graph.call_function(torch.relu))
        elif action < 0.6:
            with graph.inserting_after(anchor):
                expected.insert(index + 1, graph.call_function(torch.relu))
        elif action < 0.7 and len(expected) > 1:
            graph.erase_node(anchor)
            expected.remove(anchor)
        else:
            moved = choose.choice(expected)
            if action < 0.85:
                anchor.prepend(moved)
            else:
                anchor.append(moved)
            if moved is not anchor:
                expected.remove(moved)
                expected.insert(expected.index(anchor) + (action >= 0.85), moved)
    assert list(graph.nodes) == expected
    assert list(reversed(graph.nodes)) == expected[::-1]
    assert len(graph.nodes) == len(expected)
    assert sorted(choose.sample(expected, len(expected))) == expected


def test_insertions_at_one_place_seldom_move_the_labels_of_others_and_keep_them_small() -> None:
    # torch.fx's sort keys grow by an element at each such insertion.
    graph = Graph()
    anchor = graph.placeholder("x")
    labels: dict[Any, int] = {}
    moved, count = 0, 1000
    for _ in range(count):
        with graph.inserting_after(anchor):
            graph.call_function(torch.relu)
        now = {node: node.label for node in graph.nodes}
        moved += sum(now[node] != label for node, label in labels.items())
        labels = now
    assert moved < 2 * count * math.log2(count)
    assert max(labels.values()) < 2**63
