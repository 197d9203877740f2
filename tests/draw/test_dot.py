from __future__ import annotations

import json
import re
import shutil
import subprocess
from typing import Any

import pytest
import torch
import torchvision
from drawn import Block, Twice
from torch import nn

import featx

needs_dot = pytest.mark.skipif(not shutil.which("dot"), reason="Graphviz is not installed: apt-get install graphviz")


def parsed(dot: str) -> dict[str, Any]:
    """Return what Graphviz itself reads in a dot text."""
    done = subprocess.run(["dot", "-Tdot_json"], input=dot, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return json.loads(done.stdout)


def first_line(label: str) -> str:
    """Return the first line of a label, in which a backslash starts an escape."""
    return re.match(r"(?:[^\\]|\\[^n])*", label).group()  # pyright: ignore[reportOptionalMemberAccess]


def boxes(drawing: featx.Drawing) -> dict[int, str]:
    """Return the first line of each box, by Graphviz's number; clusters are in the same list, without a fill."""
    return {
        item["_gvid"]: first_line(item["label"])
        for item in parsed(drawing.dot)["objects"]
        if not item["name"].startswith("cluster")
    }


def edges(drawing: featx.Drawing) -> set[tuple[str, str]]:
    labels = boxes(drawing)
    return {(labels[edge["tail"]], labels[edge["head"]]) for edge in parsed(drawing.dot).get("edges", [])}


@needs_dot
def test_boxes_and_edges_of_an_open_drawing_are_those_of_the_graph() -> None:
    model = torchvision.models.resnet18(weights=None).eval()
    traced = featx.trace(model, torch.rand(1, 3, 64, 64))
    drawing = featx.draw(traced, depth=100, sizes=True)
    found = parsed(drawing.dot)
    names = {item["_gvid"]: item["tooltip"].split("\\n")[0] for item in found["objects"] if item["name"][0] == "n"}
    expected = {
        (source.meta.get("qualified_name", source.name), node.meta.get("qualified_name", node.name))
        for node in traced.graph.nodes
        for source in node.all_input_nodes
    }
    assert {(names[edge["tail"]], names[edge["head"]]) for edge in found["edges"]} == expected
    assert len(names) == len(traced.graph.nodes)


@needs_dot
def test_folded_folders_are_boxes() -> None:
    drawing = featx.draw(featx.symbolic_trace(Twice()), depth=0)
    first, second, third = "block", "block (call 2)", "block (call 3)"
    assert sorted(boxes(drawing).values()) == sorted(["x", first, second, "scale.mul", third, "output"])
    assert edges(drawing) == {
        ("x", first), (first, second), (second, "scale.mul"), ("scale.mul", third), (third, "output")
    }  # fmt: skip


@needs_dot
def test_open_folders_are_clusters() -> None:
    found = parsed(featx.draw(featx.symbolic_trace(nn.Sequential(Block(), Block())), depth=1).dot)
    clusters = {item["label"]: item["nodes"] for item in found["objects"] if item["name"].startswith("cluster")}
    assert set(clusters) == {"0 · Block", "1 · Block"}
    assert [len(nodes) for nodes in clusters.values()] == [3, 3]


@needs_dot
@pytest.mark.parametrize("name", ['a"b', "a\\nb", "a\\", "<b>", "a->b", "é×", "\\N"])
def test_names_are_written_as_they_are(name: str) -> None:
    traced = featx.symbolic_trace(Block())
    node = next(node for node in traced.graph.nodes if node.name == "act")
    node.meta["qualified_name"] = name
    assert name.replace("\\", "\\\\") in boxes(featx.draw(traced)).values()


@needs_dot
def test_graph_without_nodes_is_drawn() -> None:
    assert "objects" not in parsed(featx.draw(featx.Graph()).dot)


def test_boxes_have_the_shape_and_are_marked() -> None:
    traced = featx.trace(Block(), torch.ones(2, 4))
    lines = featx.draw(traced, highlight="act").dot.split("\n")
    line = next(line for line in lines if 'label="act\\n' in line)
    assert 'label="act\\nReLU  2×4"' in line
    assert 'class="activation marked"' in line
    assert sum(" marked" in line for line in lines) == 1
