"""select: names in a request become nodes, by equality and never as patterns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import featx
from featx.features.requests.request import as_request


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.relu = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.relu(self.relu(self.linear(x)) + x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer1 = nn.Sequential(Block(), Block())
        self.layer10 = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer10(self.layer1(x))


@pytest.fixture
def graph() -> featx.Graph:
    return featx.FeatureTracer().trace(Model())


def found(graph: featx.Graph, request: dict[str, str]) -> dict[str, str]:
    return {key: node.meta["qualified_name"] for key, node in featx.select(graph, request, "Model").items()}


def test_name_of_a_node_means_that_node(graph: featx.Graph) -> None:
    assert found(graph, {"layer1.0.add": "a"}) == {"a": "layer1.0.add"}


def test_path_of_a_module_means_the_last_node_under_it(graph: featx.Graph) -> None:
    assert found(graph, {"layer1": "a", "layer1.0": "b"}) == {"b": "layer1.0.relu_1", "a": "layer1.1.relu_1"}


def test_input_can_be_asked_for(graph: featx.Graph) -> None:
    assert found(graph, {"x": "image"}) == {"image": "x"}


def test_answer_is_in_the_order_of_the_request(graph: featx.Graph) -> None:
    assert list(found(graph, {"layer10": "c", "layer1.0.linear": "a", "layer1": "b"})) == ["c", "a", "b"]


def test_two_names_of_one_node_give_two_keys(graph: featx.Graph) -> None:
    nodes = featx.select(graph, {"layer1": "a", "layer1.1.relu_1": "b"}, "Model")
    assert nodes["a"] is nodes["b"]


@pytest.mark.parametrize(
    "name", ["layer1.", "layer1..", ".layer1", "layer.", "layer", "layer1.*", "layer1.0.relu_[0-9]", "(layer1)", ""]
)
def test_names_are_compared_whole_and_are_no_patterns(graph: featx.Graph, name: str) -> None:
    with pytest.raises(featx.NodeNameError):
        featx.select(graph, {name: "a"}, "Model")


def test_miss_names_the_owner_the_close_matches_and_the_way_to_a_list(graph: featx.Graph) -> None:
    with pytest.raises(featx.NodeNameError) as caught:
        featx.select(graph, {"layer1.0.relu2": "a"}, "Model (eval)")
    message = str(caught.value)
    assert "'layer1.0.relu2' in Model (eval)" in message
    assert "Did you mean 'layer1.0.relu" in message
    assert "get_graph_node_names" in message
    assert isinstance(caught.value, KeyError)
    assert isinstance(caught.value, ValueError)


def test_miss_without_close_matches_suggests_nothing(graph: featx.Graph) -> None:
    with pytest.raises(featx.NodeNameError) as caught:
        featx.select(graph, {"zzz": "a"}, "Model")
    assert "Did you mean" not in str(caught.value)


def test_request_is_a_dict_or_a_list() -> None:
    assert as_request({"a": "b", "c": "d"}, "return_nodes") == {"a": "b", "c": "d"}
    assert as_request(["a", "b"], "return_nodes") == {"a": "a", "b": "b"}
    assert as_request(("a",), "return_nodes") == {"a": "a"}


@pytest.mark.parametrize("request_", ["layer1", b"layer1", 3, None])
def test_request_of_another_type_is_refused(request_: Any) -> None:
    with pytest.raises(featx.ArgumentTypeError, match="return_nodes must be a list"):
        as_request(request_, "return_nodes")


@pytest.mark.parametrize("request_", [[], {}, ()])
def test_empty_request_is_refused(request_: Any) -> None:
    with pytest.raises(featx.RequestError, match="empty"):
        as_request(request_, "return_nodes")


def test_one_key_for_two_names_is_refused() -> None:
    with pytest.raises(featx.RequestError, match=r"'C'.*'a', 'b'"):
        as_request({"a": "C", "b": "C"}, "return_nodes")


def test_request_of_the_caller_is_not_changed(graph: featx.Graph) -> None:
    request = {"layer10": "b", "layer1": "a"}
    featx.select(graph, request, "Model")
    assert list(request.items()) == [("layer10", "b"), ("layer1", "a")]
