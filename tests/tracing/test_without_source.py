"""Models whose source cannot be read: code from standard input or `exec`, frozen applications."""

from __future__ import annotations

import operator
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import featx
from featx.errors import TraceError

_LAYERS = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.drop, self.head = nn.Conv2d(3, 8, 3), nn.Dropout(0.1), nn.Linear(8, 4)
"""
_CONTIGUOUS = """
        h = self.conv(x).flatten(2).transpose(1, 2).contiguous()
        return self.head(h.to(torch.float32).mean(1))
"""
_READS_MODE = """
        h = self.drop(self.conv(x)).mean((2, 3))
        return self.head(h * (2 if self.training else 1))
"""
_READS_LAYER = """
        h = self.conv(x).mean((2, 3))
        return self.head(h) * self.head.out_features
"""
_TESTS_IDENTITY = """
        h = self.conv(x)
        g = h.contiguous()
        return self.head(h.mean((2, 3))) if g is h else g
"""
_WITH = """
        with torch.no_grad():
            h = self.conv(x)
        return self.head(h.mean((2, 3)))
"""


def _model(forward: str) -> nn.Module:
    names: dict[str, Any] = {"__name__": "model_without_source"}
    exec(compile(f"{_LAYERS}    def forward(self, x):{forward}", "<no source>", "exec"), names)
    torch.manual_seed(0)
    return names["Model"]().eval()


@pytest.mark.parametrize("forward", [_CONTIGUOUS, _READS_MODE, _READS_LAYER])
def test_values_are_those_of_the_model(forward: str) -> None:
    model, x = _model(forward), torch.rand(2, 3, 8, 8)
    extractor = featx.create_feature_extractor(model, ["conv", "output"], example_inputs=(x,))
    for inputs in (x, x[:1]):
        assert torch.equal(extractor(inputs)["output"], model(inputs))
        assert torch.equal(extractor(inputs)["conv"], model.conv(inputs))
    torch.manual_seed(1)
    expected = model.train()(x)
    torch.manual_seed(1)
    assert torch.equal(extractor.train()(x)["output"], expected)


def test_test_for_identity_is_refused() -> None:
    model = _model(_TESTS_IDENTITY)
    match = "may use `is` to test whether a call returned its input.*no source to tell: put the model into a file"
    with pytest.raises(TraceError, match=match):
        featx.create_feature_extractor(model, ["output"], example_inputs=(torch.rand(1, 3, 8, 8),))


def test_error_of_a_with_statement_names_the_missing_source() -> None:
    with pytest.raises(TraceError, match=r"no source tells whether it catches errors.*put the model into a file"):
        featx.create_feature_extractor(_model(_WITH), ["output"], example_inputs=(torch.rand(1, 3, 8, 8),))


_OPERATORS = """
        y = self.conv(x)
        z = y ** 2 + 2 ** y
        y **= 2
        return y + z
"""


def test_operators_are_pickled() -> None:
    """`y ** 2` calls a function of torch that has no name under which it could be found again."""
    model, x = _model(_OPERATORS), torch.rand(2, 3, 8, 8)
    extractor = featx.create_feature_extractor(model, ["conv", "output"], example_inputs=(x,))
    again = pickle.loads(pickle.dumps(extractor))
    assert torch.equal(again(x)["output"], model(x))
    assert len(extractor.eval_graph.find_nodes(op="call_function", target=operator.pow)) == 2
