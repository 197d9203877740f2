from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from typing import Any

import pytest
import torch
import torchvision
from drawn import Block, Twice
from torch import Tensor, nn

import featx


class Elements(HTMLParser):
    """Collects the elements of a page with their attributes and the text in them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None], str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs), ""))

    def handle_data(self, data: str) -> None:
        if self.found:
            tag, attributes, text = self.found[-1]
            self.found[-1] = (tag, attributes, text + data)


def elements(page: str) -> list[tuple[str, dict[str, str | None], str]]:
    parser = Elements()
    parser.feed(page)
    return parser.found


def data_of(page: str) -> dict[str, Any]:
    text = next(text for _, attributes, text in elements(page) if attributes.get("id") == "data")
    return json.loads(text, parse_constant=pytest.fail)  # what Python reads, and browsers do not


@pytest.fixture(scope="module")
def resnet() -> featx.GraphModule:
    return featx.trace(torchvision.models.resnet18(weights=None).eval(), torch.rand(1, 3, 64, 64))


def test_data_are_the_graph(resnet: featx.GraphModule) -> None:
    data = data_of(featx.draw(resnet).html())
    nodes = list(resnet.graph.nodes)
    names: list[str] = []
    for label, folder, flags in zip(data["label"], data["folder"], data["flags"], strict=True):
        names.append(f"{data['folders'][folder][2]}.{label}" if flags & 1 else label)
    # The output has no qualified name.
    assert names == [node.meta.get("qualified_name", node.name) for node in nodes]
    inputs = [[names[place - step] for step in steps] for place, steps in enumerate(data["inputs"])]
    assert inputs == [[item.meta["qualified_name"] for item in node.all_input_nodes] for node in nodes]
    texts = data["texts"]
    shapes = ["×".join(map(str, node.meta["shape"])) if "shape" in node.meta else "" for node in nodes]
    assert [texts[place] for place in data["shape"]] == shapes
    usual = {str(place): node.name for place, node in enumerate(nodes) if names[place].replace(".", "_") != node.name}
    assert data["nodeName"] == usual


def test_folders_of_the_data_are_the_modules(resnet: featx.GraphModule) -> None:
    data = data_of(featx.draw(resnet).html())
    model = torchvision.models.resnet18(weights=None)
    for parent, label, path, kind, _, start, end in data["folders"][1:]:
        assert 0 <= parent < len(data["folders"])
        assert path.endswith(label)
        assert kind == type(model.get_submodule(path)).__name__
        names = [node.meta["qualified_name"] for node in list(resnet.graph.nodes)[start:end]]
        assert all(name.startswith(f"{path}.") for name in names)


def test_page_loads_nothing(resnet: featx.GraphModule) -> None:
    page = featx.draw(resnet).html()
    for tag, attributes, text in elements(page):
        assert not {"src", "href"} & set(attributes), tag
        if tag == "style":
            assert "url(" not in text
            assert "@import" not in text
    assert not re.findall(r"https?://", page)
    policy = next(attributes["content"] for _, attributes, _ in elements(page) if "http-equiv" in attributes)
    assert policy is not None
    assert policy.startswith("default-src 'none'")


@pytest.mark.parametrize("name", ["</script><script>alert(1)</script>", "<!--", "<b>&amp;", "{{data}}", "\u2028\\1"])
def test_names_cannot_leave_their_place(name: str) -> None:
    traced = featx.symbolic_trace(Block())
    next(node for node in traced.graph.nodes if node.name == "act").meta["qualified_name"] = name
    plain = featx.draw(featx.symbolic_trace(Block()), title="plain").html()
    page = featx.draw(traced, title=name).html()
    data = data_of(page)
    assert data["title"] == name
    assert data["label"][2] == name
    assert [tag for tag, _, _ in elements(page)] == [tag for tag, _, _ in elements(plain)]


@pytest.mark.slow
def test_node_takes_less_than_300_bytes() -> None:
    model = torchvision.models.swin_t(weights=None).eval()
    traced = featx.trace(model, torch.rand(1, 3, 64, 64))
    empty = len(featx.draw(featx.Graph()).html().encode())
    assert len(featx.draw(traced).html().encode()) - empty < 300 * len(traced.graph.nodes)


@pytest.mark.slow
def test_long_chain_takes_little() -> None:
    def chain(x: Tensor) -> Tensor:
        for _ in range(5000):
            x = (x + 1).relu()
        return x

    empty = len(featx.draw(featx.Graph()).html().encode())
    assert len(featx.draw(featx.symbolic_trace(chain)).html().encode()) - empty < 60 * 10_000


def test_open_folders_costs_and_marks_are_in_the_data() -> None:
    traced = featx.symbolic_trace(nn.Sequential(Twice(), nn.ReLU()))
    cost = {"_0_block_linear": {"flops": 12.5}, "_0_block_act": {"flops": 0}}
    data = data_of(featx.draw(traced, depth=0, cost=cost, highlight=["0.block.linear"]).html())
    assert data["costs"] == {"flops": {"1": 12.5}}
    assert [flags & 8 for flags in data["flags"]] == [0, 8] + [0] * (len(data["flags"]) - 2)
    opened = {(data["folders"][number][2], data["folders"][number][1]) for number in data["open"]}
    assert opened == {("", ""), ("0", "0"), ("0.block", "block")}
    assert data["parameters"] == {"1": 20, "4": 20, "8": 20}
    assert data["shared"] == {"4": 20, "8": 20}


def test_weights_that_two_modules_share_in_part_count_once() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    data = data_of(featx.draw(featx.symbolic_trace(model)).html())
    assert (data["parameters"], data["shared"]) == ({"1": 20, "2": 20}, {"2": 16})


def test_attribute_is_called_by_its_path_and_keeps_its_name() -> None:
    class Owner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.weight).relu()

    data = data_of(featx.draw(featx.symbolic_trace(nn.Sequential(Owner()))).html())
    assert data["label"][1] == "weight"
    assert data["folders"][data["folder"][1]][2] == "0"
    traced = featx.symbolic_trace(nn.Sequential(Owner()))
    names = [node.meta.get("qualified_name") for node in traced.graph.nodes]
    assert data["name"] == {"1": names[1]}
    assert names[1] != "0.weight"


def test_costs_that_are_no_numbers_are_left_out() -> None:
    traced = featx.symbolic_trace(Block())
    cost = {"linear": {"ratio": float("nan"), "time": float("inf")}, "act": {"ratio": -float("inf"), "time": 2.5}}
    assert data_of(featx.draw(traced, cost=cost).html())["costs"] == {"time": {"2": 2.5}}


def test_costs_that_have_no_sum_and_parameters_that_are_counted_already() -> None:
    traced = featx.symbolic_trace(Block())
    cost = {"linear": {"flops": 1, "peak": 2, "fastest": 3, "parameters": 20, "bytes_moved": 4}}
    data = data_of(featx.draw(traced, cost=cost).html())
    assert set(data["costs"]) == {"flops", "peak", "fastest", "bytes_moved"}
    assert data["summed"] == ["flops", "bytes_moved"]
    # A graph alone does not know its weights.
    traced.graph.owning_module = None
    assert "parameters" in data_of(featx.draw(traced.graph, cost=cost).html())["costs"]
