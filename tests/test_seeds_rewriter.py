"""The examples of the seed notebooks that replace patterns, with featx in place of torch.fx, and what they print."""

# ruff: noqa: T201 - the notebook prints

from __future__ import annotations

import pytest
import torch
from torch import nn

import featx as fx


class ConvBNPattern(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3)
        self.bn = nn.BatchNorm2d(16)

    def forward(self, x):  # type: ignore[no-untyped-def]
        return self.bn(self.conv(x))


class ConvBNFused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3)

    def forward(self, x):  # type: ignore[no-untyped-def]
        return self.conv(x)


def test_subgraph_rewriting_prints_the_match(capsys: pytest.CaptureFixture[str]) -> None:
    model = ConvBNPattern()
    traced = fx.symbolic_trace(model)

    print(fx.replace_pattern(traced, ConvBNPattern(), ConvBNFused()))
    assert capsys.readouterr().out == "[Match(anchor=bn, nodes_map={bn: bn, conv: conv, x: x})]\n"

    # What the notebook does not print: batch norm is gone, and the convolution is the model's own.
    x = torch.randn(2, 3, 8, 8)
    assert torch.equal(traced(x), model.conv(x))
    assert [name for name, _ in traced.named_modules()] == ["", "conv"]


def test_subgraph_rewriting_inside_a_model_that_nests_its_modules() -> None:
    """The wish after the example: the pattern is found wherever the modules are."""
    model = nn.Sequential(ConvBNPattern(), nn.ReLU(), nn.Sequential(nn.Conv2d(16, 4, 1), nn.BatchNorm2d(4)))
    traced = fx.symbolic_trace(model)

    matches = fx.replace_pattern(traced, ConvBNPattern(), ConvBNFused(), match_modules="type")
    assert [str(match.nodes_map) for match in matches] == [
        "{bn: _0_bn, conv: _0_conv, x: input_1}",
        "{bn: _2_1, conv: _2_0, x: _1}",
    ]
    x = torch.randn(2, 3, 8, 8)
    assert torch.equal(traced(x), model[2][0](torch.relu(model[0].conv(x))))
