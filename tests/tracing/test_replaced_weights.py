"""Modules that replace a weight of a child and call the child's forward directly, as WeightDrop of AWD-LSTM does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import featx


class WeightDrop(nn.Module):
    """Drops weights of a child, which it keeps as a parameter of its own: fastai/text/models/awdlstm.py."""

    def __init__(self, module: nn.Module, name: str) -> None:
        super().__init__()
        self.module, self.name = module, name
        self.raw = nn.Parameter(getattr(module, name).data.clone())

    def forward(self, *args: Any) -> Any:
        self.module._parameters[self.name] = functional.dropout(self.raw, 0.5, self.training)  # pyright: ignore[reportArgumentType]
        return self.module.forward(*args)


class AssigningDrop(WeightDrop):
    """The same by an attribute: salesforce/awd-lstm-lm."""

    def __init__(self, module: nn.Module, name: str) -> None:
        super().__init__(module, name)
        del module._parameters[name]
        self.forward(torch.zeros(1, 1, 6))

    def forward(self, *args: Any) -> Any:
        setattr(self.module, self.name, functional.dropout(self.raw, 0.5, self.training))
        return self.module.forward(*args)


KINDS = [WeightDrop, AssigningDrop]
CHILDREN = {"linear": (nn.Linear, "weight"), "lstm": (nn.LSTM, "weight_hh_l0")}


def model_of(kind: type[WeightDrop], child: str) -> nn.Sequential:
    torch.manual_seed(0)
    layer, name = CHILDREN[child]
    return nn.Sequential(nn.Embedding(20, 6), kind(layer(6, 6), name))


def first(value: Any) -> torch.Tensor:
    return value[0] if isinstance(value, tuple) else value


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("child", CHILDREN)
@pytest.mark.parametrize("kind", KINDS)
def test_such_a_module_is_kept_whole(kind: type[WeightDrop], child: str, training: bool) -> None:
    ids = torch.randint(0, 20, (6, 2))
    extractor = featx.create_feature_extractor(model_of(kind, child).train(training), ["0", "1"], example_inputs=ids)
    model = model_of(kind, child).train(training)
    for seed, shape in enumerate([(6, 2), (9, 3), (6, 2)]):
        ids = torch.randint(0, 20, shape)
        torch.manual_seed(seed)
        expected = first(model(ids))
        torch.manual_seed(seed)
        found = extractor(ids)
        assert torch.equal(found["0"], model[0](ids))
        assert torch.equal(first(found["1"]), expected)


@pytest.mark.parametrize("child", CHILDREN)
@pytest.mark.parametrize("kind", KINDS)
def test_a_trace_that_looks_into_all_modules_keeps_it_whole(kind: type[WeightDrop], child: str) -> None:
    model, ids = model_of(kind, child).eval(), torch.randint(0, 20, (6, 2))
    traced = featx.trace(model_of(kind, child).eval(), ids)
    assert [node.target for node in traced.graph.nodes if node.op == "call_module"] == ["0", "1"]
    assert torch.equal(first(traced(ids)), first(model(ids)))


def test_a_root_that_replaces_a_weight_is_refused() -> None:
    model = WeightDrop(nn.Linear(6, 6), "weight").train()
    with pytest.raises(featx.TraceError, match="forward replaces 'weight' of 'module'"):
        featx.trace(model, torch.rand(2, 6))
