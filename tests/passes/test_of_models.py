"""cost, profile, draw and trace of models: as they are, without a graph, on an example or on none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchvision
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import featx

X = torch.rand(2, 3, 32, 32)


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    return torchvision.models.resnet18(weights=None).eval()


@pytest.mark.slow
def test_cost_of_a_model(model: nn.Module) -> None:
    report = featx.cost(model, X)
    with FlopCounterMode(display=False) as counter:
        model(X)
    assert report.total.flops == counter.get_total_flops()
    assert report.total.flops == featx.cost(featx.trace(model, X), X).total.flops
    assert "layer1.0.add" in [node.qualified_name for node in report.nodes]
    assert "layer1.0.add" in report.node_table()


@pytest.mark.slow
def test_cost_of_a_model_alone(model: nn.Module) -> None:
    with FlopCounterMode(display=False) as counter:
        model(torch.rand(2, 3, 224, 224))
    assert featx.cost(model).total.flops == counter.get_total_flops()


def test_profile_of_a_model(model: nn.Module) -> None:
    report = featx.profile(model, X, repeats=1, warmup=0)
    assert {"conv1", "layer4.1.add", "fc"} <= {node.qualified_name for node in report.nodes}
    assert "linear" in [node.qualified_name for node in featx.profile(nn.Linear(3, 4), repeats=1).nodes]


@pytest.mark.slow
def test_drawing_of_a_model(model: nn.Module) -> None:
    assert "layer1" in featx.draw(model, X).dot
    assert "layer1" in featx.draw(model).dot
    assert featx.draw(model, X).dot == featx.draw(featx.trace(model, X)).dot


def test_trace_of_a_model_alone(model: nn.Module) -> None:
    assert torch.equal(featx.trace(model)(X), model(X))

    class NoInput(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, scale: float = 2.0) -> torch.Tensor:
            return self.weight * scale

    assert torch.equal(featx.trace(NoInput())(), torch.full((2,), 2.0))


@pytest.mark.slow
def test_reports_are_short_where_they_are_not_printed(model: nn.Module) -> None:
    cost, times = featx.cost(model, X), featx.profile(model, X, repeats=1, warmup=0)
    assert repr(cost).startswith("<CostReport of ResNet: 11.7 M parameters, 150 MFLOPs, ")
    assert repr(times).startswith("<ProfileReport of ResNet: ")
    for report in (cost, times):
        assert len(repr(report)) < 120
        assert report._repr_html_().startswith("<pre>")
        assert len(report._repr_html_()) < 10_000
        assert "layer1" in report._repr_html_()


def test_a_node_is_found_by_the_name_that_it_is_asked_for_by(model: nn.Module) -> None:
    graph = featx.trace(model, X).graph
    assert graph["layer1.0.add"].name == "add"
    assert graph["add"] is graph["layer1.0.add"]
    assert graph["layer1.0.relu_1"].target == "layer1.0.relu"
    with pytest.raises(featx.NodeNameError, match=r"no node 'layer1\.0\.ad'\. Did you mean 'layer1\.0\.add'"):
        graph["layer1.0.ad"]
    with pytest.raises(TypeError, match="not iterable"):
        iter(graph)  # type: ignore[call-overload]


def test_errors_name_nodes_as_they_are_asked_for(model: nn.Module) -> None:
    module = featx.trace(model, X)
    with pytest.raises(RuntimeError) as caught:
        featx.Interpreter(module).run(torch.rand(2, 3, 32, 32).double())
    assert "named 'layer1" not in str(caught.value)
    graph = module.graph
    with graph.inserting_before(graph["layer1.0.add"]):
        graph["layer1.0.add"].args = (graph["conv1"], graph["layer1.0.bn2"])
    with pytest.raises(RuntimeError, match=r"named 'layer1\.0\.add'"):
        featx.Interpreter(module).run(X)
