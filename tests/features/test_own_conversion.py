"""Extractors of models that convert tensors in plain attributes themselves, as detectors do with their anchors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import featx

X = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Anchored(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3)
        self.head = nn.Conv2d(4, 4, 1)
        self.anchors = torch.rand(4, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.stem(x)) + self.anchors

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Anchored:
        super()._apply(fn, recurse)
        self.anchors = fn(self.anchors)
        return self


@pytest.mark.parametrize("adaptive", [True, False])
def test_conversion_that_leaves_out_a_tensor_is_refused_and_changes_nothing(adaptive: bool) -> None:
    torch.manual_seed(0)
    model = Anchored().eval()
    extractor = featx.create_feature_extractor(model, ["output"], example_inputs=X, adaptive=adaptive)
    with pytest.raises(featx.GraphError, match=r"'anchors', .* Anchored converts it .* convert the model"):
        extractor.bfloat16()
    assert {each.dtype for each in extractor.parameters()} == {torch.float32}
    assert torch.equal(extractor(X)["output"], model(X))
    assert extractor.to("cpu").float() is extractor  # changes nothing
    converted: Any = featx.create_feature_extractor(model.double(), ["output"], example_inputs=X.double())
    assert torch.equal(converted(X.double())["output"], model(X.double()))


def test_what_reads_no_such_tensor_is_converted() -> None:
    torch.manual_seed(0)
    model = Anchored().eval()
    expected = copy.deepcopy(model).double().stem(X.double())
    extractor = featx.create_feature_extractor(model, ["stem"], example_inputs=X).double()
    assert torch.equal(extractor(X.double())["stem"], expected)
