from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from featx import Graph, GraphModule, symbolic_trace
from featx.errors import SpecializationError
from featx.passes import remove_dropout

X = torch.randn(2, 4, 3)


def names(gm: GraphModule) -> list[str]:
    return [node.name for node in gm.graph.nodes if not node.meta.get("is_guard") and node.name != "training"]


RANKS: dict[Any, tuple[int, ...]] = {
    nn.Dropout2d: (2, 4, 3, 3), functional.dropout2d: (2, 4, 3, 3), nn.Dropout3d: (2, 4, 3, 3, 3),
    functional.dropout3d: (2, 4, 3, 3, 3),
}  # fmt: skip


@pytest.mark.parametrize(
    "layer",
    [nn.Dropout(), nn.Dropout1d(), nn.Dropout2d(), nn.Dropout3d(), nn.AlphaDropout(), nn.FeatureAlphaDropout()],
    ids=lambda layer: type(layer).__name__,
)
def test_module_in_eval_mode_goes_and_the_mode_is_checked(layer: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(3, 3), layer, nn.ReLU()).eval()
    x = torch.randn(RANKS.get(type(layer), (2, 4, 3)))
    gm = symbolic_trace(model)
    assert remove_dropout(gm)
    gm.graph.lint()
    assert names(gm) == ["input_1", "_0", "_2", "output"]
    assert torch.equal(gm(x), model(x))
    with pytest.raises(SpecializationError, match="dropout was removed"):
        gm.train()(x)
    assert not remove_dropout(gm.eval())


def test_module_in_train_mode_stays() -> None:
    assert not remove_dropout(symbolic_trace(nn.Sequential(nn.Dropout()).train()))
    part_in_eval = nn.Sequential(nn.Dropout().eval()).train()
    part_in_eval[0].eval()
    assert not remove_dropout(symbolic_trace(part_in_eval))


def test_module_with_hooks_or_of_an_own_class_stays() -> None:
    class Own(nn.Dropout):
        pass

    hooked = nn.Dropout()
    hooked.register_forward_hook(lambda module, inputs, output: output + 1)
    for layer in (hooked, Own()):
        graph = Graph()
        graph.output(graph.call_module("0", (graph.placeholder("x"),)))
        assert not remove_dropout(GraphModule(nn.Sequential(layer).eval(), graph))


FUNCTIONS: list[Any] = [
    functional.dropout, functional.dropout1d, functional.dropout2d, functional.dropout3d, functional.alpha_dropout,
    functional.feature_alpha_dropout, torch.dropout, torch.alpha_dropout, torch.feature_dropout,
    torch.feature_alpha_dropout,
]  # fmt: skip


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
@pytest.mark.parametrize("by_keyword", [False, True])
def test_function_that_does_not_train_goes(function: Any, by_keyword: bool) -> None:
    graph = Graph()
    x = graph.placeholder("x")
    flag = "train" if function in (FUNCTIONS[6:]) else "training"
    off, on = (
        graph.call_function(function, (x, 0.5), {flag: value}) if by_keyword else
        graph.call_function(function, (x, 0.5, value)) for value in (False, True)
    )  # fmt: skip
    graph.output((off, on))
    gm = GraphModule(nn.Module(), graph)
    inputs = torch.randn(RANKS.get(function, (2, 4, 3)))
    torch.manual_seed(0)
    expected = gm(inputs)
    assert remove_dropout(gm)
    assert gm.graph.output_node().args[0] == (x, on)
    assert not gm.graph.find_nodes(op="get_attr", target="training")  # it does the same in both modes
    torch.manual_seed(0)
    torch.testing.assert_close(gm(inputs), expected, rtol=0, atol=0)


def test_default_of_the_flag_counts() -> None:
    assert not remove_dropout(symbolic_trace(lambda x: functional.dropout(x, 0.5)))
    assert remove_dropout(symbolic_trace(lambda x: functional.alpha_dropout(x, 0.5)))


def test_function_that_computes_the_flag_stays() -> None:
    gm = symbolic_trace(lambda x: functional.dropout(x, 0.5, x.requires_grad))
    assert not remove_dropout(gm)


def test_chain_of_dropouts_goes_in_one_run() -> None:
    model = nn.Sequential(nn.Dropout(), nn.Dropout(), nn.Linear(3, 3), nn.Dropout()).eval()
    gm = symbolic_trace(model)
    assert remove_dropout(gm)
    assert names(gm) == ["input_1", "_2", "output"]


def test_writes_into_the_result_reach_the_input_as_before() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        y = x * 1
        functional.dropout(y, 0.5, False).add_(1)
        return y

    gm = symbolic_trace(forward)
    assert remove_dropout(gm)
    assert torch.equal(gm(X), forward(X))


def test_dropout_of_channels_stays_where_its_result_is_written() -> None:
    # It may give another view than its input: for one image it adds a dimension and takes it away.
    gm = symbolic_trace(lambda x: functional.dropout1d(x, 0.5, False).add_(1))
    assert not remove_dropout(gm)
