"""roofline: which ceiling binds, by hand; and what is drawn."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import featx
from featx.passes import NodeTime, Peaks, ProfileReport, Roofline, measure_peaks, roofline

SECONDS = {"_0": 2.0, "_1": 0.5, "flatten": 0.25, "cat": 0.25}


class Model(nn.Sequential):
    def forward(self, x: torch.Tensor):
        x = self[1](self[0](x)).flatten()
        return torch.cat([x, x])


def module() -> featx.GraphModule:
    return featx.symbolic_trace(Model(nn.Linear(10, 10, bias=False), nn.ReLU()))


def times(module: featx.GraphModule) -> ProfileReport:
    nodes = [node for node in module.graph.nodes if node.op not in ("placeholder", "output")]
    rows = [NodeTime(n.name, n.op, str(n.target), "", SECONDS[n.name], 0, 0, SECONDS[n.name] / 3) for n in nodes]
    return ProfileReport(tuple(rows), (), 3.0, 3.0, 1)


@pytest.fixture
def found() -> Roofline:
    traced = module()
    # The linear layer: 2 * 20 * 10 * 10 FLOPs, and 200 + 100 numbers read and 200 written, of 4 bytes.
    return roofline(times(traced), featx.cost(traced, torch.rand(20, 10)), Peaks(4000.0, 2000.0))


def test_nodes_by_hand(found: Roofline) -> None:
    rows = {n.name: (n.operations, n.bytes_moved, n.bound, n.attained) for n in found.nodes}
    assert rows == {
        # Two seconds where the ceiling of arithmetic allows one.
        "_0": (4000, 2000, "compute", 0.5),
        # 200 comparisons; 1600 bytes take 0.8 seconds, and it took 0.5.
        "_1": (200, 1600, "memory", 1.6),
        "flatten": (0, 0, "none", 0.0),
        # Reads 200 numbers, writes 400.
        "cat": (0, 2400, "memory", 4.8),
    }
    assert [node.name for node in found.nodes][:2] == ["_0", "_1"], "the longest first"
    linear = found.nodes[0]
    assert (linear.intensity, linear.operations_per_second, linear.bytes_per_second) == (2.0, 2000.0, 1000.0)
    assert found.peaks.ridge == 2.0


def test_table(found: Roofline) -> None:
    lines = str(found).splitlines()
    assert lines[0].split("  ")[0] == "node"
    assert lines[2].split() == "_0 compute 2 s 66.7 % 4.00 k 2.00 kB 2 2.00 kFLOP/s 1.00 kB/s 50 %".split()
    assert lines[-1] == (
        "ceilings: 4.00 kFLOP/s and 2.00 kB/s, equal at 2 FLOP/B; of the time, 67 % in nodes bound by compute, "
        "25 % in nodes bound by memory, 8 % in nodes bound by none"
    )
    assert len(found.table(top=1).splitlines()) == 3


def test_reports_of_different_graphs() -> None:
    traced, value = module(), torch.rand(20, 10)
    other = featx.cost(featx.symbolic_trace(nn.Sequential(nn.Linear(10, 10))), value)
    with pytest.raises(featx.ArgumentTypeError, match="different graphs: the one has 4 nodes"):
        roofline(times(traced), other, Peaks(1.0, 1.0))


def test_ceilings_that_nothing_could_reach_are_refused() -> None:
    for peaks in ((0.0, 1e9), (1e9, -1.0), (float("nan"), 1.0)):
        with pytest.raises(featx.ArgumentTypeError, match=r"must be above 0, got .*measure_peaks"):
            Peaks(*peaks)


def test_graph_that_computes_nothing_has_a_report() -> None:
    traced = featx.symbolic_trace(lambda x: x)
    assert str(roofline(times(traced), featx.cost(traced, torch.rand(2)), Peaks(1e9, 1e9))).endswith("is measured")


@pytest.mark.slow
def test_plot_has_a_disc_for_each_node_that_computes(found: Roofline, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figure: Any = found.plot(tmp_path / "roof.png", top=5)
    assert (tmp_path / "roof.png").read_bytes()[1:4] == b"PNG"
    axes, names = figure.axes
    points = [tuple(point) for discs in axes.collections for point in discs.get_offsets().data]
    assert sorted(points) == [(200 / 1600, 400.0), (2.0, 2000.0)]
    # The roof rises to the ridge and is flat from there.
    roof = axes.lines[0].get_xydata().tolist()
    assert roof[1] == [2.0, 4000.0]
    assert roof[0][1] == pytest.approx(2000 * roof[0][0])
    assert roof[2][1] == 4000.0
    assert [text.get_text() for text in names.texts] == ["1  _0  66.7 %", "2  _1  16.7 %"]
    assert "8 % of the time" in axes.get_title() or "17 % of the time" in axes.get_title()


@pytest.mark.slow
def test_plot_of_nothing_and_of_nodes_on_one_spot() -> None:
    pytest.importorskip("matplotlib")
    traced = featx.symbolic_trace(lambda x: x.view(-1))
    profile = ProfileReport((NodeTime("view", "call_method", "view", "", 1.0, 1.0, 1.0, 1.0),), (), 1.0, 1.0, 1)
    Roofline((), Peaks(1.0, 1.0)).plot()
    roofline(profile, featx.cost(traced, torch.rand(2, 2)), Peaks(1.0, 1.0)).plot()


def test_missing_matplotlib_says_what_to_install(found: Roofline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(featx.MissingExtraError, match=r'pip install "featx\[plot\]"') as caught:
        found.plot()
    assert isinstance(caught.value, ImportError)
    assert caught.value.name == "matplotlib"


def test_ceilings_are_measured() -> None:
    peaks = measure_peaks(seconds=0.02)
    assert peaks.flops_per_second > 0
    assert peaks.bytes_per_second > 0
