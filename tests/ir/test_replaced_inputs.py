"""Inputs of a node that are replaced many times before anybody reads its arguments."""

from __future__ import annotations

import copy
import pickle
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.fx

import featx


@pytest.mark.parametrize("reads", [0.0, 0.3], ids=["read at the end", "read in between"])
@pytest.mark.parametrize("seed", range(8))
def test_inputs_replaced_in_any_order_are_those_of_torch_fx(seed: int, reads: float) -> None:
    draw = random.Random(seed)
    graphs: list[Any] = [featx.Graph(), torch.fx.Graph()]
    sources = [[graph.placeholder(f"x{index}") for index in range(6)] for graph in graphs]
    chosen = [draw.randrange(6) for _ in range(5)]
    readers: list[Any] = []
    for graph, (*xs,) in zip(graphs, sources, strict=True):
        a, b, c, d, e = (xs[index] for index in chosen)
        readers.append(graph.call_function(torch.cat, (a, [b, (c, 1)], slice(d, None)), {"dim": {"k": e}}))
    for _ in range(40):
        old, new, one = draw.randrange(6), draw.randrange(6), draw.random()
        for (reader, xs), is_all in zip(zip(readers, sources, strict=True), [one < 0.3] * 2, strict=True):
            if is_all:
                xs[old].replace_all_uses_with(xs[new])
            else:
                reader.replace_input_with(xs[old], xs[new])
        if draw.random() < reads:
            assert str(readers[0].args) == str(readers[1].args)
        for ours, theirs in zip(*sources, strict=True):
            assert list(map(str, ours.users)) == list(map(str, theirs.users))
    assert str(readers[0].kwargs) == str(readers[1].kwargs)
    assert str(readers[0].args) == str(readers[1].args)
    graphs[0].lint()


def _inputs_of(node: featx.Node) -> tuple[Any, ...]:
    return node.args, node.kwargs, node.all_input_nodes


def test_arguments_that_two_threads_read_first_are_the_same() -> None:
    for _ in range(50):
        graph = featx.Graph()
        xs = [graph.placeholder(f"x{index}") for index in range(200)]
        y = graph.placeholder("y")
        reader = graph.call_function(torch.cat, (xs,), {"dim": xs[0]})
        for x in xs:
            reader.replace_input_with(x, y)
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(_inputs_of, [reader] * 8))
        assert all(each == (([y] * 200,), {"dim": y}, [y]) for each in found)


def test_a_copy_of_a_graph_has_the_inputs_that_replaced_others() -> None:
    graph = featx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    graph.output(graph.call_function(torch.relu, (x,)))
    x.replace_all_uses_with(y)
    for copied in (copy.deepcopy(graph), pickle.loads(pickle.dumps(graph))):
        assert [str(node.args) for node in copied.find_nodes(op="call_function", target=torch.relu)] == ["(y,)"]
