"""Objects in a model's file that forward changes: they are as they were after a trace, and what counts is refused."""

from __future__ import annotations

import array
import collections
import contextlib
import io
import itertools
import queue
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import featx

COUNTER = itertools.count(5, 2)
ARRAY = np.zeros(2)
OF_PYTHON = array.array("i", [0])
BYTES = bytearray(1)
FILE = io.StringIO()
DEQUE: collections.deque[int] = collections.deque(maxlen=100)
SET: set[int] = set()
QUEUE: queue.Queue[int] = queue.Queue()
DEEP: dict[str, Any] = {"a": {"b": {"c": {"d": [0]}}}}
RANDOM = random.Random(0)
RANDOM_OF_NUMPY = np.random.default_rng(0)
RANDOM_OF_TORCH = torch.Generator().manual_seed(0)
OLD_RANDOM_OF_NUMPY = np.random.Generator(np.random.MT19937(0))


def counted() -> float:
    return float(next(COUNTER))


def in_array() -> float:
    ARRAY[0] += 1
    return float(ARRAY[0])


def in_array_of_python() -> float:
    OF_PYTHON.append(1)
    return len(OF_PYTHON)


def in_bytes() -> float:
    BYTES.append(1)
    return len(BYTES)


def in_file() -> float:
    FILE.write("x")
    return FILE.tell()


def in_deque() -> float:
    DEQUE.append(len(DEQUE))
    return len(DEQUE)


def in_set() -> float:
    SET.add(len(SET))
    return len(SET)


def in_queue() -> float:
    QUEUE.put(1)
    return QUEUE.qsize()


def in_list() -> float:
    items = DEEP["a"]["b"]["c"]["d"]
    items.append(1)
    return len(items)


def drawn() -> float:
    return RANDOM.random()


def drawn_by_numpy() -> float:
    return float(RANDOM_OF_NUMPY.random())


def drawn_by_older_numpy() -> float:
    return float(OLD_RANDOM_OF_NUMPY.random())


CHANGES: dict[Callable[[], float], Callable[[], Any]] = {
    counted: lambda: repr(COUNTER),
    in_array: ARRAY.tolist,
    in_array_of_python: OF_PYTHON.tolist,
    in_bytes: lambda: bytes(BYTES),
    in_file: lambda: (FILE.getvalue(), FILE.tell()),
    in_deque: lambda: [*DEQUE],
    in_set: lambda: {*SET},
    in_queue: lambda: [*QUEUE.queue],
    in_list: lambda: [*DEEP["a"]["b"]["c"]["d"]],
    drawn: RANDOM.getstate,
    drawn_by_numpy: lambda: RANDOM_OF_NUMPY.bit_generator.state,
    drawn_by_older_numpy: lambda: str(OLD_RANDOM_OF_NUMPY.bit_generator.state),
}


class Changes(nn.Module):
    def __init__(self, change: Callable[[], float]) -> None:
        super().__init__()
        self.layer, self.change = nn.Linear(4, 4), change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.change()


class ChangesAndDropsIt(Changes):
    """Python alone sees the change: one of a million calls does something else."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) if self.change() < 1_000_000 else x


X = torch.rand(2, 4)
ENTRIES: dict[str, Callable[[nn.Module], Any]] = {
    "names": lambda model: featx.get_graph_node_names(model, example_inputs=X),
    "trace": lambda model: featx.trace(model, X),
    "extractor": lambda model: featx.create_feature_extractor(model, ["output"], example_inputs=X),
    "symbolic names": lambda model: featx.get_graph_node_names(model, tracer="symbolic"),
    "symbolic": featx.symbolic_trace,
}


@pytest.mark.parametrize("entry", [pytest.param("extractor", marks=pytest.mark.slow), "symbolic names", "symbolic"])
@pytest.mark.parametrize("change", CHANGES)
def test_objects_are_as_they_were_behind_a_trace(change: Callable[[], float], entry: str) -> None:
    model = Changes(change)
    model(X)
    before = CHANGES[change]()
    try:
        ENTRIES[entry](model)
    except featx.TraceError:
        assert entry not in ("symbolic",)
    assert CHANGES[change]() == before


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Changes, ChangesAndDropsIt])
@pytest.mark.parametrize("change", CHANGES)
def test_a_value_that_each_call_changes_is_refused(change: Callable[[], float], kind: type[Changes]) -> None:
    with pytest.raises(featx.TraceError):
        featx.create_feature_extractor(kind(change), ["output"], example_inputs=X)


class Noise(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.randn(x.shape, generator=RANDOM_OF_TORCH)


@pytest.mark.parametrize("entry", ENTRIES)
def test_generator_of_torch_that_a_file_holds_draws_in_calls_alone(entry: str) -> None:
    model = nn.Sequential(Noise(), nn.Linear(4, 4)).eval()
    before = RANDOM_OF_TORCH.get_state()
    with contextlib.suppress(featx.FeatxError):
        ENTRIES[entry](model)
    assert torch.equal(RANDOM_OF_TORCH.get_state(), before)


def test_module_that_draws_from_it_draws_in_an_extractor_what_it_draws_in_the_model() -> None:
    model = nn.Sequential(Noise(), nn.Linear(4, 4)).eval()
    extractor = featx.create_feature_extractor(model, ["1"], example_inputs=X)
    state = RANDOM_OF_TORCH.get_state()
    expected = [model(X), model(X)]
    RANDOM_OF_TORCH.set_state(state)
    assert [torch.equal(extractor(X)["1"], each) for each in expected] == [True, True]
