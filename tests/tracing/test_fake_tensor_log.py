"""What torch logs of fake tensors reaches no terminal where featx expects failures, and is logged as ever elsewhere."""

from __future__ import annotations

import logging
import threading
from collections.abc import Generator

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import featx
from featx.tracing.environment.fake_tensor_log import failures_expected

LOGGER = logging.getLogger("torch._subclasses.fake_tensor")


class Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@pytest.fixture
def records() -> Generator[Records]:
    handler = Records()
    LOGGER.addHandler(handler)
    yield handler
    LOGGER.removeHandler(handler)


def fail_on_fakes() -> None:
    with FakeTensorMode(), pytest.raises(RuntimeError):
        torch.empty(2, 3) @ torch.empty(4, 5)


def network_of_one_image_size() -> nn.Module:
    """Return the network of DQN, which takes images of 84 x 84 pixels alone, and is guessed others."""
    return nn.Sequential(
        nn.Conv2d(4, 32, 8, 4), nn.Conv2d(32, 64, 4, 2), nn.Conv2d(64, 64, 3), nn.Flatten(), nn.Linear(3136, 512)
    )


def test_a_guess_that_fails_is_not_logged(records: Records) -> None:
    table = featx.nodes(network_of_one_image_size())
    assert table["4"].shape is None
    assert records.texts == []


def test_a_count_that_fails_is_not_logged_but_raised(records: Records) -> None:
    graph = featx.create_feature_extractor(network_of_one_image_size(), ["4"], example_inputs=torch.rand(1, 4, 84, 84))
    with pytest.raises(RuntimeError):
        featx.cost(graph, torch.rand(1, 4, 96, 96))
    assert records.texts == []


def test_failures_are_logged_outside_and_afterwards(records: Records) -> None:
    fail_on_fakes()
    assert len(records.texts) == 1
    with failures_expected():
        fail_on_fakes()
        with failures_expected():
            fail_on_fakes()
        fail_on_fakes()
    assert len(records.texts) == 1
    with pytest.raises(KeyError), failures_expected():
        raise KeyError
    fail_on_fakes()
    assert len(records.texts) == 2


def test_failures_of_another_thread_are_logged_meanwhile(records: Records) -> None:
    with failures_expected():
        thread = threading.Thread(target=fail_on_fakes)
        thread.start()
        thread.join()
    assert len(records.texts) == 1


def test_the_configuration_of_logging_stays(records: Records) -> None:
    before = (list(LOGGER.handlers), LOGGER.level, LOGGER.disabled, LOGGER.propagate, logging.root.manager.disable)
    for _ in range(3):
        featx.nodes(network_of_one_image_size())
    after = (list(LOGGER.handlers), LOGGER.level, LOGGER.disabled, LOGGER.propagate, logging.root.manager.disable)
    assert after == before
    assert len(LOGGER.filters) == len(set(LOGGER.filters)) <= 1
