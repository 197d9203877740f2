"""A Feature of a module that returns several tensors is refused with the names of the nodes that are these tensors."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

import featx
from featx import Feature

X = torch.rand(2, 5, 4, generator=torch.Generator().manual_seed(0))


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Any:
        return {"all": (self.linear(x),), "mean": x.mean(1)}


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.block = nn.LSTM(4, 4, batch_first=True), Nested()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, _ = self.rnn(x)
        found = self.block(y)
        return found["all"][0].mean(1) + found["mean"]


def refusal(model: nn.Module, name: str, example: Any) -> str:
    with pytest.raises(featx.RequestError) as caught:
        featx.create_feature_extractor(model, {name: Feature("x", pool="avg")}, example_inputs=example)
    return str(caught.value)


def pooled(model: nn.Module, name: str, example: Any) -> Any:
    extractor = featx.create_feature_extractor(model, {name: Feature("x", pool="avg")}, example_inputs=example)
    with torch.no_grad():
        return (extractor(**example) if isinstance(example, dict) else extractor(example))["x"]


def value_of(model: nn.Module, name: str, example: Any) -> Any:
    """Return what a module returns, by a forward hook."""
    found: list[Any] = []
    handle = model.get_submodule(name).register_forward_hook(lambda module, args, result: found.append(result))
    with torch.no_grad():
        model(**example) if isinstance(example, dict) else model(example)
    handle.remove()
    return found[-1]


def test_the_nodes_inside_a_nested_result_are_named() -> None:
    model = Layers().eval()
    text = refusal(model, "block", X)
    assert "holds 2 tensors: ['all'][0], ['mean']." in text
    assert "Ask for one of these nodes: ['all'][0] is 'block.linear', ['mean'] is 'block.mean'; or do" in text
    assert torch.equal(pooled(model, "block.linear", X), value_of(model, "block", X)["all"][0].mean(1))


def test_what_code_takes_out_of_the_result_of_a_layer_is_named() -> None:
    model = Layers().eval()
    text = refusal(model, "rnn", X)
    assert "holds 3 tensors: [0], [1][0], [1][1]. Ask for one of these nodes: [0] is 'getitem'; or do" in text
    assert torch.equal(pooled(model, "getitem", X), value_of(model, "rnn", X)[0].mean(1))


def test_without_names_the_value_can_still_be_had_by_apply() -> None:
    model = nn.Sequential(nn.LSTM(4, 4, batch_first=True)).eval()  # no code takes anything out of its result
    text = refusal(model, "0", X)
    assert "Ask for the node inside that is this tensor, or do all of it in apply" in text
    request = {"0": Feature("x", apply=lambda value: value[0].mean(1))}
    with torch.no_grad():
        found = featx.create_feature_extractor(model, request, example_inputs=X)(X)["x"]
    assert torch.equal(found, value_of(model, "0", X)[0].mean(1))


@pytest.mark.slow
def test_the_node_of_the_hidden_states_of_a_block_of_t5_is_named() -> None:
    transformers: Any = pytest.importorskip("transformers")
    config = transformers.T5Config(
        vocab_size=50, d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    model, example = transformers.T5EncoderModel(config).eval(), {"input_ids": torch.arange(14).reshape(2, 7)}
    named = re.search(r"\[0\] is '([^']+)'", refusal(model, "encoder.block.0", example))
    assert named is not None
    assert named[1] == "encoder.block.0.layer.1.add"
    expected = value_of(model, "encoder.block.0", example)[0].mean(1)
    assert torch.equal(pooled(model, named[1], example), expected)
