from __future__ import annotations

import html
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.fx
import torchvision
from drawn import Block, Twice, leaf_at
from torch import nn

import featx


def test_save_writes_what_the_ending_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawing = featx.draw(featx.symbolic_trace(Block()))
    drawing.save(tmp_path / "a.html")
    drawing.save(str(tmp_path / "a.DOT"))
    assert (tmp_path / "a.html").read_text(encoding="utf-8") == drawing.html()
    assert (tmp_path / "a.DOT").read_text(encoding="utf-8") == drawing.dot
    monkeypatch.setattr(featx.Drawing, "svg", lambda self: "<svg/>")
    drawing.save(tmp_path / "a.svg")
    assert (tmp_path / "a.svg").read_text() == "<svg/>"


@pytest.mark.parametrize("name", ["a.png", "a"])
def test_other_endings_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(featx.DrawingError, match=r"save a drawing as \.html, \.svg, \.dot"):
        featx.draw(featx.symbolic_trace(Block())).save(tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_notebooks_show_the_page_in_a_frame() -> None:
    drawing = featx.draw(featx.symbolic_trace(Block()))
    frame = drawing._repr_html_()
    page = frame.partition('srcdoc="')[2].partition('"')[0]
    assert html.unescape(page) == drawing.html()
    assert 'sandbox="allow-scripts"' in frame


def test_drawing_says_what_it_is() -> None:
    assert repr(featx.draw(featx.symbolic_trace(Block()))) == "<Drawing of Block; save it as .html, .svg or .dot>"
    assert featx.draw(featx.symbolic_trace(Block()), title="mine").title == "mine"
    assert featx.draw(featx.Graph()).title == "Graph"


def test_graph_knows_its_module() -> None:
    traced = featx.symbolic_trace(Block())
    drawing = featx.draw(traced.graph)
    assert drawing.title == "Block"
    assert drawing.html() == featx.draw(traced).html()


def test_drawing_stays_as_the_graph_was() -> None:
    traced = featx.symbolic_trace(Block())
    drawing = featx.draw(traced)
    before = drawing.dot, drawing.html()
    act = next(node for node in traced.graph.nodes if node.name == "act")
    act.replace_all_uses_with(act.args[0])
    traced.graph.erase_node(act)
    act.meta["qualified_name"] = "other"
    assert (drawing.dot, drawing.html()) == before
    assert pickle.loads(pickle.dumps(drawing)).dot == before[0]


def test_graph_and_module_are_as_before() -> None:
    traced = featx.trace(Twice(), torch.ones(1, 4))
    before = traced.code, traced.graph.edits, [dict(node.meta) for node in traced.graph.nodes], set(vars(traced))
    drawing = featx.draw(traced, depth=9, cost={"block_linear": 1}, highlight=["block.act"])
    assert drawing.dot
    assert drawing.html()
    after = traced.code, traced.graph.edits, [dict(node.meta) for node in traced.graph.nodes], set(vars(traced))
    assert after == before


@pytest.mark.slow
def test_extractor_shows_whole_modules_and_the_present_mode() -> None:
    model = torchvision.models.googlenet(weights=None, init_weights=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        extractor = featx.create_feature_extractor(
            model, train_return_nodes={"aux2.fc2": "aux"}, eval_return_nodes={"inception3a.branch1": "branch"}
        )
    train = featx.draw(extractor.train()).root
    evaluated = featx.draw(extractor.eval()).root
    assert leaf_at(train, "inception3b").operation == "Inception"
    assert leaf_at(train, "inception3b").kind == "module"
    assert "inception3b" not in {leaf.name for leaf in evaluated.leaves()}
    assert "inception3a" in {folder.path for folder in evaluated.folders()} | {
        leaf.name.rpartition(".")[0] for leaf in evaluated.leaves()
    }
    assert featx.draw(extractor.train_graph).html() == featx.draw(extractor.train()).html()


@pytest.mark.slow
def test_replaced_and_transformed_graphs_are_drawn() -> None:
    traced = featx.symbolic_trace(nn.Sequential(Block(), Block()))
    featx.replace_pattern(traced, lambda x: torch.nn.functional.relu(x), lambda x: torch.tanh(x))
    assert featx.draw(featx.Transformer(traced).transform()).html()
    assert featx.draw(featx.from_torch_fx(torch.fx.symbolic_trace(Twice()))).html()


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        (torch.fx.symbolic_trace(nn.ReLU()), r"from_torch_fx"),
        (3, "got int"),
    ],
)
def test_what_is_no_graph_gets_advice(given: Any, advice: str) -> None:
    with pytest.raises(featx.ArgumentTypeError, match=advice):
        featx.draw(given)


def test_adaptive_extractor_gets_advice() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    extractor = featx.create_feature_extractor(model, ["0"], example_inputs=torch.ones(1, 4), adaptive=True)
    with pytest.raises(featx.ArgumentTypeError, match=r"extractor\.extractors\[0\]"):
        featx.draw(extractor)  # pyright: ignore[reportArgumentType]
    assert featx.draw(extractor.extractors[0]).html()


def test_highlight_takes_nodes_and_names() -> None:
    traced = featx.symbolic_trace(Twice())
    node = next(node for node in traced.graph.nodes if node.name == "mul")
    for highlight in ([node], node, "mul", ["scale.mul"]):
        leaves = featx.draw(traced, highlight=highlight).root.leaves()
        assert [leaf.node_name for leaf in leaves if leaf.is_highlighted] == ["mul"]


def test_highlight_takes_modules() -> None:
    leaves = featx.draw(featx.symbolic_trace(Block()), highlight="linear").root.leaves()
    assert [leaf.node_name for leaf in leaves if leaf.is_highlighted] == ["linear"]
    traced = featx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Linear(2, 2))))
    leaves = featx.draw(traced, highlight=["1"]).root.leaves()
    assert [leaf.node_name for leaf in leaves if leaf.is_highlighted] == ["_1_0", "_1_1"]


def test_highlight_of_another_graph_is_refused() -> None:
    other = next(iter(featx.symbolic_trace(Block()).graph.nodes))
    for highlight in (["nothing"], [other]):
        with pytest.raises(featx.ForeignNodeError, match="not in the graph"):
            featx.draw(featx.symbolic_trace(Twice()), highlight=highlight)
