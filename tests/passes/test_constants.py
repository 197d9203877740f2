from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from featx import GraphModule, Node, symbolic_trace, trace
from featx.errors import ArgumentTypeError, SpecializationError
from featx.ir.effects import CallEffects, Effects, MeasuredEffects
from featx.passes import fold_constants


class Model(nn.Module):
    def __init__(self, body: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(3, 3))
        self.frozen = nn.Parameter(torch.rand(3, 3), requires_grad=False)
        self.register_buffer("table", torch.rand(3, 3))
        self.linear = nn.Linear(3, 3).requires_grad_(False)
        self.dropout, self.norm = nn.Dropout(), nn.BatchNorm1d(3)
        self.body = body

    def forward(self, x: torch.Tensor) -> Any:
        return self.body(self, x)


X = torch.rand(2, 3)


def folded(body: Callable[[Any, Any], Any], **options: Any) -> GraphModule:
    """Return the graph of a model with its constants folded, after comparing what it computes."""
    model = Model(body).eval()
    gm = symbolic_trace(model)
    code, state = gm.code, dict(gm.state_dict())
    expected = model(X.clone())
    changed = fold_constants(gm, **options)
    gm.graph.lint()
    assert changed is (gm.code != code)
    torch.testing.assert_close(gm(X.clone()), expected, rtol=0, atol=0)
    assert gm.state_dict().keys() == state.keys()
    return gm


def names(gm: GraphModule) -> list[str]:
    return [node.name for node in gm.graph.nodes]


def test_what_comes_from_buffers_becomes_a_buffer_outside_the_state_dict() -> None:
    gm = folded(lambda m, x: x @ (m.table.t() * 2).softmax(dim=1))
    assert names(gm) == ["x", "softmax", "matmul", "output"]
    assert gm.graph.find_nodes(op="get_attr")[0].target == "_folded_softmax"
    assert "_folded_softmax" not in gm.state_dict()
    assert gm.double().get_buffer("_folded_softmax").dtype is torch.float64


def test_what_comes_from_literals_keeps_its_dtype() -> None:
    gm = folded(lambda m, x: x + torch.arange(3) * torch.ones(3, dtype=torch.float64))
    assert names(gm) == ["x", "add", "output"]
    (literal,) = [
        value for value in next(n for n in gm.graph.nodes if n.name == "add").args if not isinstance(value, Node)
    ]
    assert isinstance(literal, torch.Tensor)
    assert gm.half()(X.half()).dtype is torch.float64


def test_original_model_does_not_get_the_buffer_and_copies_keep_the_value() -> None:
    model = Model(lambda m, x: x @ m.table.exp())
    gm = symbolic_trace(model)
    fold_constants(gm)
    assert [name for name, _ in model.named_buffers() if "folded" in name] == []
    for other in (copy.copy(gm), copy.deepcopy(gm)):
        assert torch.equal(other(X), model(X))


def test_trainable_parameters_are_folded_only_where_asked() -> None:
    body: Callable[[Any, Any], Any] = lambda m, x: x @ m.weight.exp()  # noqa: E731
    assert "exp" in [node.target for node in folded(body).graph.nodes]
    gm = folded(body, include_trainable=True)
    assert "exp" not in [node.target for node in gm.graph.nodes]
    assert not gm(X).requires_grad
    assert names(folded(lambda m, x: x @ m.frozen.exp())) == ["x", "exp", "matmul", "output"]


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(lambda m, x: x @ m.table.t(), id="a view of the model's tensor"),
        pytest.param(lambda m, x: x @ torch.rand(3, 3).mul(0), id="draws"),
        pytest.param(lambda m, x: (x, m.table * 2), id="returned"),
        pytest.param(lambda m, x: (x, (m.table * 2).view(-1)), id="a view of it is returned"),
        pytest.param(lambda m, x: x @ (m.table * 2).add_(1), id="written"),
        pytest.param(lambda m, x: x @ (m.table * 2).view(3, 3).t().mul_(2), id="a view of it is written"),
        pytest.param(lambda m, x: x @ m.table.add_(1).exp(), id="the model's tensor is written"),
        pytest.param(lambda m, x: x.reshape(m.table.shape[0], 2), id="a form"),
        pytest.param(lambda m, x: x, id="nothing"),
    ],
)
def test_what_is_no_constant_stays(body: Callable[..., Any]) -> None:
    model = Model(body).eval()
    gm = symbolic_trace(model)
    before = gm.code
    assert not fold_constants(gm)
    assert gm.code == before


def test_write_that_follows_or_precedes_a_read_is_seen_at_each_call() -> None:
    model = Model(lambda m, x: (x @ m.table.exp(), m.table.add_(1))[0]).eval()
    gm = symbolic_trace(copy.deepcopy(model))
    fold_constants(gm)
    for _ in range(2):
        assert torch.equal(gm(X), model(X))


def test_large_values_are_computed_in_each_run() -> None:
    body: Callable[[Any, Any], Any] = lambda m, x: x @ m.table.exp().log()  # noqa: E731
    assert "exp" in names(folded(body, max_bytes=35))
    assert "exp" not in names(folded(body, max_bytes=36))


@pytest.mark.parametrize("wrong", [-1, 1.5, "1M"])
def test_limit_that_is_no_number_of_bytes_is_refused(wrong: Any) -> None:
    with pytest.raises(ArgumentTypeError, match="max_bytes"):
        fold_constants(symbolic_trace(Model(lambda m, x: x)), max_bytes=wrong)


def test_small_part_of_a_large_value_does_not_keep_it() -> None:
    gm = folded(lambda m, x: x * m.table.repeat(100, 1).exp()[0])
    (buffer,) = [value for name, value in gm.named_buffers() if "folded" in name]
    assert buffer.untyped_storage().nbytes() == 12


def test_module_of_torch_on_constants_is_folded() -> None:
    gm = folded(lambda m, x: x @ m.linear(m.table).relu())
    assert [node.op for node in gm.graph.nodes].count("call_module") == 0


def test_module_whose_weights_are_written_is_left_alone() -> None:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = m.linear(m.table)
        m.linear.bias.add_(1)
        return x @ y

    model = Model(body).eval()
    gm = symbolic_trace(copy.deepcopy(model))
    assert not fold_constants(gm)
    for _ in range(2):
        assert torch.equal(gm(X), model(X))


def test_module_that_differs_in_train_mode_is_folded_and_the_mode_checked() -> None:
    gm = folded(lambda m, x: x @ m.dropout(m.table.exp()).log())
    assert [node.op for node in gm.graph.nodes].count("call_module") == 0
    with pytest.raises(SpecializationError, match="train mode"):
        gm.train()(X)
    model = Model(lambda m, x: x @ m.dropout(m.table.exp())).train()
    gm = symbolic_trace(model)
    fold_constants(gm)
    assert "dropout" in names(gm)


def test_statistics_that_train_mode_writes_are_folded_and_the_mode_checked() -> None:
    gm = folded(lambda m, x: m.norm(x) * m.norm.running_mean.exp())
    with pytest.raises(SpecializationError, match="train mode"):
        gm.train()(X)


@pytest.mark.slow
def test_calls_under_autocast_and_without_gradients_are_told_apart() -> None:
    def under_autocast(m: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            table = m.table @ m.table
        return x @ table.float()

    model = Model(under_autocast).eval()
    gm = trace(model, X)
    fold_constants(gm)
    assert torch.equal(gm(X), model(X))

    def without_gradients(m: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            table = m.table.exp()
        return x @ table

    model = Model(without_gradients)
    gm = trace(model, X)
    assert fold_constants(gm)
    assert torch.equal(gm(X), model(X))


def test_call_that_raises_is_left_to_the_run() -> None:
    gm = symbolic_trace(Model(lambda m, x: x @ m.table.sum(dim=1)))
    (call,) = gm.graph.find_nodes(op="call_method", target="sum")
    call.kwargs = {"dim": 7}
    assert not fold_constants(gm)
    with pytest.raises(IndexError, match="Dimension out of range"):
        gm(X)


def test_positions_of_a_relative_bias_are_folded() -> None:
    # What swin and the like compute at each call from buffers alone.
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        index = torch.arange(3)[:, None] - torch.arange(3)[None, :] + 2
        return x @ functional.embedding(index.clamp(max=2), m.frozen).sum(-1)

    assert len(folded(body).graph.nodes) == 4


def test_buffer_that_takes_the_place_of_a_call_has_none_of_its_effects() -> None:
    gm = symbolic_trace(Model(lambda m, x: x @ m.table.exp()))
    (call,) = gm.graph.find_nodes(op="call_method", target="exp")
    call.meta["effects"] = MeasuredEffects(shares=(0,))
    assert fold_constants(gm)
    assert Effects(gm.graph, gm).of(call) == CallEffects()


def test_a_second_run_finds_nothing() -> None:
    gm = folded(lambda m, x: x @ (m.table * 2))
    assert not fold_constants(gm)
