"""What the logger "featx" tells of the runs of a model."""

from __future__ import annotations

import logging
import re
import time

import numpy as np
import pytest
import torch
from torch import nn

import featx


class Slow(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.5)
        return x.reshape(x.shape[0], -1) + 1


@pytest.mark.slow
@pytest.mark.usefixtures("undisturbed")
def test_each_run_is_told_with_its_reason_and_what_takes_long(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="featx"):
        featx.trace(Slow(), torch.rand(2, 3))
    runs = [record.getMessage() for record in caplog.records if record.levelno == logging.DEBUG]
    assert re.fullmatch(r"Slow, run 1, without values: the example, done, \d+\.\d ms", runs[0])
    assert any("other sizes (2 as 5 at 0)" in run for run in runs)
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    assert len(told) == 1
    assert told[0].startswith("tracing Slow took ")
    assert told[0].endswith(f"{len(runs)} runs, 0 with values")


def test_nothing_is_told_of_what_is_fast(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="featx"):
        featx.trace(nn.Linear(3, 3), torch.rand(2, 3))
    assert not caplog.records


class ThroughNumpy(nn.Module):
    """Computes with numpy what it returns, which no graph can follow."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(np.tanh(self.linear(x).detach().numpy()))


def test_a_refused_request_runs_forward_as_often_as_there_are_ways_to_open_it(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="featx"), pytest.raises(featx.TraceError, match="numpy"):
        featx.create_feature_extractor(ThroughNumpy(), ["output"], example_inputs=torch.rand(2, 3))
    # In each mode, with what is needed opened and with all modules.
    assert len([record for record in caplog.records if record.levelno == logging.DEBUG]) == 2 * 2
