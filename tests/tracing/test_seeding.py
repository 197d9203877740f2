"""Seeding torch's generator is noticed although it is in that state already."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn

import featx
from featx.tracing.environment import generators
from featx.tracing.environment.generators import TorchGenerator
from featx.tracing.environment.other_threads import OtherThreads
from featx.tracing.side_effects.foreign_tensors import ForeignTensors


@pytest.mark.parametrize(
    ("change", "is_set"),
    [
        (lambda: torch.manual_seed(3), True),
        (lambda: torch.default_generator.manual_seed(3), True),
        (lambda: torch.set_rng_state(torch.get_rng_state()), False),
        (lambda: torch.Generator().manual_seed(3), False),
        (lambda: torch.initial_seed(), False),
    ],
)
def test_seed_that_is_there_already_counts_where_calls_are_seen(change: Callable[[], object], is_set: bool) -> None:
    torch.manual_seed(3)
    generator = TorchGenerator()
    generator.has_profile_hook = True
    generator.note()
    profile = sys.getprofile()
    sys.setprofile(generator.on_call)
    try:
        change()
    finally:
        sys.setprofile(profile)
    assert generator.was_set() is is_set
    generator.note()
    assert not generator.was_set()


@pytest.mark.parametrize("is_drawn_from", [False, True])
def test_what_a_trace_leaves_is_put_back_though_another_thread_has_run(
    is_drawn_from: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generators, "is_only_thread", lambda: True)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    generator = TorchGenerator()
    generator.note()

    has_run, is_over = threading.Event(), threading.Event()

    def run() -> None:
        sum(range(1_000_000))
        if is_drawn_from:
            torch.rand(1)
        has_run.set()
        is_over.wait()

    thread = threading.Thread(target=run)
    thread.start()
    has_run.wait()
    left = torch.get_rng_state()
    generator.restore()
    is_over.set()
    thread.join()
    assert torch.equal(torch.get_rng_state(), left if is_drawn_from else before)


@pytest.mark.parametrize("way", ["was_set", "note"])
def test_draws_of_another_thread_that_a_trace_takes_note_of_stay(way: str) -> None:
    has_drawn, is_over = threading.Event(), threading.Event()
    generator = TorchGenerator()

    def draw() -> None:
        torch.rand(1)
        has_drawn.set()
        is_over.wait()

    thread = threading.Thread(target=draw)
    thread.start()
    has_drawn.wait()
    left = torch.get_rng_state()
    getattr(generator, way)()
    generator.restore()
    is_over.set()
    thread.join()
    assert torch.equal(torch.get_rng_state(), left)


class Seeds(nn.Module):
    """Seeds the generator of the CPU by a method in C, which no trace replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.default_generator.manual_seed(3)
        x = self.inner(x)
        return x + torch.rand_like(x)


@pytest.fixture
def is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this be the only thread: beside others, which may draw from it, a trace does not put the generator back.

    Those of pytest-xdist run now and then.
    """
    monkeypatch.setattr(generators, "is_only_thread", lambda: True)
    monkeypatch.setattr(OtherThreads, "have_run", lambda threads: False)


@pytest.mark.usefixtures("is_alone")
def test_seed_that_is_there_already_is_noticed_by_a_trace() -> None:
    model = Seeds().eval()
    for seed in (3, 4):
        x = torch.rand(2, 4)
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        with pytest.raises(featx.TraceError, match="forward seeds torch's random generator"):
            featx.create_feature_extractor(model, ["inner.1", "output"], example_inputs=x)
        assert torch.equal(torch.get_rng_state(), before)


def _restores(x: torch.Tensor) -> torch.Tensor:
    state = torch.get_rng_state()
    first = torch.rand(3)
    torch.set_rng_state(state)
    return x + first - torch.rand(3)


def _forks(x: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng():
        first = torch.rand(3)
    return x + first - torch.rand(3)


def _seeds(x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(5)
    return x + torch.rand(3)


@pytest.mark.usefixtures("is_alone")
@pytest.mark.parametrize("function", [_restores, _forks, _seeds])
def test_a_symbolic_trace_notices_it_and_leaves_the_generator_alone(
    function: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    before = torch.get_rng_state()
    with pytest.raises(featx.TraceError, match="forward seeds torch's random generator, or puts it back"):
        featx.symbolic_trace(function)
    assert torch.equal(torch.get_rng_state(), before)


class SeedsByTorch(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(3)
        return x + torch.randn(6)


def test_a_seed_that_is_there_already_is_noticed_after_torch_compile_was_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    importlib.import_module("torch._dynamo")  # which puts another function in the place of torch.manual_seed
    monkeypatch.setattr(TorchGenerator, "was_set", lambda generator: False)  # as beside other threads
    with pytest.raises(featx.TraceError, match="seeds torch's random generator"):
        featx.trace(SeedsByTorch(), torch.rand(2, 6))


class TakesGradient(nn.Module):
    """Its call of torch.func makes wrapped tensors of what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(lambda each: self.layer(each).tanh().sum())(x)


def test_a_gradient_that_a_module_takes_of_the_input_moves_no_generator() -> None:
    model = nn.Sequential(TakesGradient(), nn.Linear(4, 2)).eval()
    before = torch.get_rng_state()
    extractor = featx.create_feature_extractor(model, ["1"], example_inputs=torch.ones(2, 4))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(extractor(torch.ones(2, 4))["1"], model(torch.ones(2, 4)))


def test_tensors_of_a_call_of_torch_func_are_not_assigned_after_it() -> None:
    foreign = ForeignTensors([], are_shared=True)

    def function(x: torch.Tensor) -> torch.Tensor:
        foreign.save_form(x)
        return x.sum()

    torch.func.grad(function)(torch.ones(2))
    foreign.restore()
