from __future__ import annotations

import shutil
from pathlib import Path
from xml.etree import ElementTree

import pytest
from drawn import Block, Twice
from torch import nn

import featx
from featx.drawing.dot import FILLS
from featx.drawing.svg import render_svg

needs_dot = pytest.mark.skipif(not shutil.which("dot"), reason="Graphviz is not installed: apt-get install graphviz")
SVG = "{http://www.w3.org/2000/svg}"


@needs_dot
def test_svg_holds_the_labels() -> None:
    root = ElementTree.fromstring(featx.draw(featx.symbolic_trace(Twice())).svg())
    texts = {element.text for element in root.iter(f"{SVG}text")}
    assert {"x", "linear", "act_1", "scale.mul", "block · Block", "block (call 2) · Block", "output"} <= texts


@needs_dot
def test_style_for_the_dark_names_every_kind() -> None:
    svg = featx.draw(featx.symbolic_trace(Block())).svg()
    style = svg.partition("<style>")[2].partition("</style>")[0]
    assert all(f".{kind} >" in style for kind in FILLS)


def test_missing_program_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(featx.DrawingError, match=r"program 'dot'.*apt-get install graphviz.*save as \.html"):
        featx.draw(featx.symbolic_trace(Block())).svg()


@needs_dot
def test_failure_of_the_program_is_told() -> None:
    with pytest.raises(featx.DrawingError, match=r"'dot' failed: .*syntax error"):
        render_svg("digraph {")


def test_too_many_boxes_are_refused() -> None:
    traced = featx.symbolic_trace(nn.Sequential(*[nn.ReLU() for _ in range(30)]))
    with pytest.raises(featx.DrawingError, match="has 32 boxes, more than max_nodes=31"):
        featx.draw(traced, max_nodes=31).svg()
