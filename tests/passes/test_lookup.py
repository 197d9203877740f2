from __future__ import annotations

import pytest
import torch
from torch import nn

from featx import GraphModule, trace
from featx.errors import ForeignNodeError, NodeNameError
from featx.passes.lookup import find_nodes, quoted


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + x


def traced() -> GraphModule:
    return trace(nn.Sequential(Block(), nn.ReLU()), torch.rand(2, 4))


def found(gm: GraphModule, *names: str) -> list[str]:
    return [node.meta["qualified_name"] for node in find_nodes(gm, names)]


def test_names_of_nodes_modules_and_paths_are_found() -> None:
    gm = traced()
    assert found(gm, "0.linear", "0", "1", "_1", "0.add") == ["0.linear", "0.add", "1", "1", "0.add"]


def test_one_name_or_node_need_not_be_a_list() -> None:
    gm = traced()
    (node,) = find_nodes(gm, "1")
    assert find_nodes(gm, node) == [node]


def test_name_that_is_not_there_gets_those_that_are_close() -> None:
    with pytest.raises(NodeNameError, match=r"No node '0.lienar' in Sequential. Did you mean '0.linear'"):
        find_nodes(traced(), "0.lienar")


def test_erased_nodes_and_those_of_others_are_refused() -> None:
    gm = traced()
    relu = find_nodes(gm, "1")[0]
    relu.replace_all_uses_with(relu.all_input_nodes[0])
    gm.graph.erase_node(relu)
    for node in (relu, find_nodes(traced(), "1")[0], gm.graph.output_node()):
        with pytest.raises(ForeignNodeError, match=f"'{node.name}' computes no value in the graph of this Sequential"):
            find_nodes(gm, [node])


def test_name_in_an_error_comes_with_the_line_of_the_model() -> None:
    add = find_nodes(traced(), "0.add")[0]
    assert quoted(add).startswith(f"'{add.name}' at {__file__}:")
    del add.meta["source"]
    assert quoted(add) == f"'{add.name}'"
