"""Lineage: where an object of a trace comes from, by identity."""

from __future__ import annotations

import gc

import torch

from featx import Graph
from featx.tracing.history.lineage import Lineage


def test_equal_objects_have_each_their_own_origin() -> None:
    graph, lineage = Graph(), Lineage()
    one, other = torch.ones(2), torch.ones(2)
    first, second = graph.placeholder("x"), graph.placeholder("y")
    lineage.put(one, first)
    lineage.put(other, second)
    assert lineage.get(one) is first
    assert lineage.get(other) is second
    assert lineage.get(torch.ones(2)) is None


def test_later_entry_takes_the_place_of_the_earlier_one() -> None:
    graph, lineage, x = Graph(), Lineage(), torch.ones(2)
    first, second = graph.placeholder("x"), graph.placeholder("y")
    lineage.put(x, first)
    lineage.put(x, second)
    assert lineage.get(x) is second


def test_forget_brings_back_what_was_known_at_the_mark() -> None:
    graph, lineage, x = Graph(), Lineage(), torch.ones(2)
    nodes = [graph.placeholder(name) for name in "abc"]
    lineage.put(x, nodes[0])
    mark = lineage.mark()
    lineage.put(x, nodes[1])
    lineage.put(x, nodes[2])
    lineage.forget(mark)
    assert lineage.get(x) is nodes[0]
    lineage.put(x, nodes[2])
    assert lineage.get(x) is nodes[2]


def test_object_is_kept_alive_so_that_its_id_stays_its_own() -> None:
    lineage, node = Lineage(), Graph().placeholder("x")
    keys: set[int] = set()
    for _ in range(100):
        value = torch.ones(1)
        keys.add(id(value))
        lineage.put(value, node)
        del value
        gc.collect(0)
    assert len(keys) == 100
