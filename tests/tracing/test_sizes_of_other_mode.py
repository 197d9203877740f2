"""Other sizes of a model that runs for real, in eval mode and in train mode."""

from __future__ import annotations

import logging
import re

import pytest
import torch
from torch import Tensor, nn

import featx


class Chosen(nn.Module):
    """Goes on with as many rows as have a positive sum, for which a trace needs values; keeps its mode in a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(4, 6)
        self.drop = nn.Dropout(0.5)
        self.after = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(self.before(x))
        count = int((h.sum(-1) > -1e9).sum())
        return self.after(h[:count] * count)


def real_runs(caplog: pytest.LogCaptureFixture) -> list[int]:
    """Return how many runs with values each trace has made at other sizes."""
    runs: list[int] = []
    for record in caplog.records:
        text = record.getMessage()
        if re.search(r"run 1, ", text):
            runs.append(0)
        runs[-1:] = [runs[-1] + (", with values: other sizes" in text)]
    return runs


@pytest.mark.parametrize("training", [True, False])
def test_only_eval_mode_runs_for_real_at_other_sizes(caplog: pytest.LogCaptureFixture, training: bool) -> None:
    model = Chosen().train(training)
    with caplog.at_level(logging.DEBUG, logger="featx"):
        extractor = featx.create_feature_extractor(model, ["after"], example_inputs=torch.rand(5, 4))
    in_train, in_eval = real_runs(caplog)
    assert (in_train > 0, in_eval > 0) == (False, True)
    x = torch.rand(9, 4)
    torch.manual_seed(0)
    expected = model(x)
    torch.manual_seed(0)
    torch.testing.assert_close(extractor(x)["after"], expected, rtol=0, atol=0)


def test_a_size_that_was_not_tried_is_traced_when_it_comes() -> None:
    model = Chosen().train()
    extractor = featx.create_feature_extractor(model, ["after"], example_inputs=torch.rand(5, 4)).eval()
    for rows in (5, 9, 2):
        x = torch.rand(rows, 4)
        torch.testing.assert_close(extractor(x)["after"], model.eval()(x), rtol=0, atol=0)
