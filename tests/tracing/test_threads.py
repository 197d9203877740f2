"""Traces in many threads, of a model that others run and train meanwhile: nobody notices the others."""

from __future__ import annotations

import copy
import errno
import logging.handlers
import multiprocessing
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, typename  # the globals of typename are those of torch

import featx
from featx.tracing.environment.other_threads import AllThreads, OtherThreads
from featx.tracing.replica.model_context import ModelContext

THREADS = 8  # a trace takes a few milliseconds, and the eight share one interpreter lock
IMAGES = torch.rand(2, 3, 12, 12, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """Has all that a trace could disturb: statistics, draws, attributes that forward writes, and modes."""

    def __init__(self, needs_values: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.dropout = nn.Dropout(0.3)
        self.head = nn.Linear(8, 4)
        self.needs_values = needs_values
        self.size: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.size = x.shape
        x = self.norm(self.conv(x))
        if self.needs_values and x.sum() > -1e9:
            x = x.relu()
        return self.head(self.dropout(x.mean((2, 3))))


def entry_points(model: nn.Module) -> list[Callable[[], Any]]:
    options: dict[str, Any] = {"example_inputs": IMAGES, "suppress_diff_warning": True}
    return [
        lambda: featx.get_graph_node_names(model, **options),
        lambda: featx.create_feature_extractor(model, ["conv", "mean"], **options),
        lambda: featx.create_feature_extractor(model, ["norm"], **options, adaptive=True),
        lambda: featx.trace(model, IMAGES),
        lambda: featx.create_feature_extractor(model, ["norm"], tracer="symbolic", suppress_diff_warning=True),
    ]


def train(model: nn.Module, steps: int = 6) -> list[float]:
    """Train a little with the default generator, and return the losses."""
    torch.manual_seed(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses: list[float] = []
    for _ in range(steps):
        loss = model(IMAGES).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def while_others_trace(model: nn.Module, calls: list[Callable[[], Any]], action: Callable[[], Any]) -> Any:
    """Return what `action` gives while threads go through `calls`, each from another place on."""
    is_over, start = threading.Event(), threading.Barrier(THREADS + 1)
    errors: list[BaseException] = []

    def work(first: int) -> None:
        start.wait()
        position = first
        while not is_over.is_set() or position == first:
            try:
                calls[position % len(calls)]()
            except BaseException as error:
                errors.append(error)
            position += 1

    threads = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    start.wait()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)  # more switches at more places, and this thread gets its turn
    try:
        result = action()
    finally:
        sys.setswitchinterval(interval)
        is_over.set()
        for thread in threads:
            thread.join()
    assert not errors, errors
    return result


def described(model: nn.Module) -> list[Any]:
    """Return what each module holds, by identity, without what its own forward writes."""
    return [[(name, id(value)) for name, value in vars(module).items() if name != "size"] for module in model.modules()]


@pytest.mark.slow
@pytest.mark.parametrize("needs_values", [False, True], ids=["without values", "for real"])
def test_training_of_a_model_that_others_trace_is_that_of_one_alone(needs_values: bool) -> None:
    model = Net(needs_values).train()
    alone = copy.deepcopy(model)
    expected = train(alone)
    calls = entry_points(model)[: 4 if needs_values else 5]
    before = described(model)
    assert while_others_trace(model, calls, lambda: train(model)) == expected
    assert described(model) == before
    for name, tensor in alone.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    assert all(module.training for module in model.modules())


@pytest.mark.slow
@pytest.mark.parametrize("needs_values", [False, True], ids=["without values", "for real"])
def test_values_of_a_model_that_others_trace_and_of_their_extractors_are_right(needs_values: bool) -> None:
    model = Net(needs_values).eval()
    expected = model(IMAGES)
    norm = model.norm(model.conv(IMAGES))

    def check_extractor() -> None:
        extractor = featx.create_feature_extractor(model, {"norm": "C1"}, example_inputs=IMAGES)
        assert torch.equal(extractor(IMAGES)["C1"], norm)

    def check_trace() -> None:
        assert torch.equal(featx.trace(model, IMAGES)(IMAGES), expected)

    def run() -> bool:
        return all(torch.equal(model(IMAGES), expected) for _ in range(20))

    assert while_others_trace(model, [check_extractor, check_trace], run)
    assert not any(module.training for module in model.modules())


@pytest.mark.slow
def test_functions_of_a_python_module_are_its_own_again() -> None:
    before = {name: id(value) for name, value in globals().items()}
    model = Net()
    while_others_trace(model, entry_points(model), lambda: None)
    assert {name: id(value) for name, value in globals().items()} == before


def test_torch_itself_is_untouched_during_a_trace() -> None:
    before = {name: id(value) for name, value in vars(torch).items()}
    changed: list[str] = []

    class Looking(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            changed.extend(name for name, value in vars(torch).items() if before.get(name) != id(value))
            return x * len(typename(x))

    featx.trace(Looking(), IMAGES)
    assert changed == []


@pytest.mark.slow
def test_seed_that_this_thread_sets_while_others_trace_stays() -> None:
    model = Net().eval()

    def draw() -> list[list[float]]:
        found: list[list[float]] = []
        for seed in range(60):
            torch.manual_seed(seed)
            found.append(torch.rand(3).tolist())
        return found

    expected = draw()
    assert while_others_trace(model, entry_points(model), draw) == expected


@pytest.fixture
def busy_thread() -> Iterator[None]:
    """Another thread that always runs, so that nobody can tell which of the two has drawn from a generator."""
    over = threading.Event()

    def run() -> None:
        while not over.wait(0.0005):
            sum(range(2000))

    thread = threading.Thread(target=run)
    thread.start()
    yield
    over.set()
    thread.join()


@featx.wrap
def dropped(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rand(3).sum() + nn.functional.dropout(x)


class Draws(nn.Module):
    def __init__(self, draw: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.draw(x)


DRAWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "layer": nn.Dropout(0.5),
    "layer in place": nn.Sequential(nn.Identity(), nn.Dropout(0.5, inplace=True)),
    "call": nn.functional.dropout,
    "factory": lambda x: x + torch.rand(2).sum(),
    "value": lambda x: x * torch.rand(2).sum().item(),
    "function that is one node": dropped,
}


@pytest.mark.parametrize("size", [3, 100], ids=["small", "large"])
@pytest.mark.parametrize("draw", DRAWS)
def test_traces_do_not_draw_from_the_generator_that_all_threads_share(busy_thread: None, draw: str, size: int) -> None:
    model, x = Draws(DRAWS[draw]).train(), torch.rand(1, 3, size, size)
    before = torch.get_rng_state()
    featx.trace(model, x)
    names = featx.get_graph_node_names(model, example_inputs=x)[0]
    featx.create_feature_extractor(model, names[-1:], example_inputs=x)
    assert torch.equal(torch.get_rng_state(), before)


class Parallel(nn.Module):
    """Has another thread compute a part of its result."""

    def __init__(self, start: Callable[[nn.Module, torch.Tensor], Callable[[], Any]], needs_values: bool) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
        self.start, self.needs_values = start, needs_values

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.needs_values and x.sum() < -1e9:
            x = -x
        result = self.start(self.one, x)
        return self.other(x) + result()


def in_a_thread(module: nn.Module, x: torch.Tensor) -> Callable[[], Any]:
    results: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: results.append(module(x)))
    thread.start()

    def result() -> torch.Tensor:
        thread.join()
        return results[0]

    return result


POOL = ThreadPoolExecutor(1)
FORKS = multiprocessing.get_context("fork")
STARTS: dict[str, Callable[[nn.Module, torch.Tensor], Callable[[], Any]]] = {
    "a thread": in_a_thread,
    "a module in a pool": lambda module, x: POOL.submit(module, x).result,
    "a function in a pool": lambda module, x: POOL.submit(torch.relu, x).result,
    "a number of a pool": lambda module, x: POOL.submit(lambda: x.sum().item()).result,
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("needs_values", [False, True], ids=["without values", "for real"])
@pytest.mark.parametrize("start", STARTS)
def test_work_that_forward_hands_to_another_thread_is_refused_or_kept_whole(start: str, needs_values: bool) -> None:
    model = Parallel(STARTS[start], needs_values).eval()
    x, other = torch.rand(2, 4), torch.rand(2, 4)
    with pytest.raises(featx.TraceError, match=r"hands work to another thread|does not see it"):
        featx.trace(model, x)
    whole = nn.Sequential(model, nn.ReLU())
    extractor = featx.create_feature_extractor(whole, {"1": "out"}, example_inputs=x, suppress_diff_warning=True)
    assert torch.equal(extractor.eval()(other)["out"], whole(other))


def in_a_process(module: nn.Module, x: torch.Tensor) -> Callable[[], Any]:
    ours, theirs = FORKS.Pipe()
    FORKS.Process(target=theirs.send, args=(x.detach().numpy() * 2,)).start()
    return lambda: torch.from_numpy(ours.recv())


def test_work_that_forward_hands_to_another_process_is_refused() -> None:
    with pytest.raises(featx.TraceError, match="hands work to another thread or process"):
        featx.trace(Parallel(in_a_process, needs_values=False).eval(), torch.rand(2, 4))


class Hidden(nn.Module):
    """Hands work to a thread of which its file names nothing."""

    def __init__(self, apply: Callable[..., Any]) -> None:
        super().__init__()
        self.apply_elsewhere = apply

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.apply_elsewhere(lambda: torch.full((4,), float(x.detach().numpy().sum())))


def test_work_that_forward_hands_over_without_naming_threads_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelContext, "uses_threading", False)
    with pytest.raises(featx.TraceError, match="hands work to another thread or process"):
        featx.trace(Hidden(lambda function: POOL.submit(function).result()), torch.rand(2, 4))


class Logs(nn.Module):
    def __init__(self, logger: logging.Logger, needs_values: bool) -> None:
        super().__init__()
        self.linear, self.log, self.needs_values = nn.Linear(4, 4), logger.warning, needs_values

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        if self.needs_values and y.sum().item() > 1e6:
            y = y / 2
        self.log("a slow path for %s", x.shape)
        return y * 2


@pytest.mark.parametrize("needs_values", [False, True], ids=["without values", "for real"])
@pytest.mark.parametrize("handler", [logging.NullHandler, lambda: logging.handlers.QueueHandler(queue.Queue())])
def test_records_of_logging_are_no_work_for_others(handler: Callable[[], logging.Handler], needs_values: bool) -> None:
    logger = logging.Logger("of a model")
    logger.addHandler(handler())
    model, x = Logs(logger, needs_values).eval(), torch.rand(3, 4)
    extractor = featx.create_feature_extractor(model, ["linear", "output"], example_inputs=torch.rand(2, 4))
    found = extractor(x)
    assert torch.equal(found["linear"], model.linear(x))
    assert torch.equal(found["output"], model(x))


def test_the_smallest_work_of_a_thread_that_was_there_before_is_noticed() -> None:
    POOL.submit(int).result()
    for _ in range(1000):
        others = AllThreads()
        POOL.submit(int).result()
        assert others.have_run()


def test_threads_that_end_at_any_moment_are_no_trouble() -> None:
    is_over = threading.Event()

    def start_threads() -> None:
        while not is_over.is_set():
            threading.Thread(target=int).start()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    starters = [threading.Thread(target=start_threads) for _ in range(3)]
    for starter in starters:
        starter.start()
    try:
        for _ in range(1000):
            OtherThreads().have_run()
    finally:
        sys.setswitchinterval(interval)
        is_over.set()
        for starter in starters:
            starter.join()


@pytest.mark.parametrize("number", [errno.ESRCH, errno.EINVAL])
def test_the_clock_of_a_thread_that_has_just_ended_is_no_trouble(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    POOL.submit(int).result()

    def has_ended(clock: int) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(time, "clock_gettime_ns", has_ended)
    assert not OtherThreads().have_run()


class EndsEarly(nn.Module):
    """Asks for a value after its blocks, and has a method that could write weights."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5))
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        x = self.block(x)
        return x.relu() if x.sum() > 0 else x


@pytest.mark.slow
def test_draws_of_another_thread_go_on_while_a_trace_looks_for_writes_behind_its_end() -> None:
    model = EndsEarly()
    drawn: list[float] = []
    is_over = threading.Event()
    torch.manual_seed(0)

    def draw() -> None:
        while not is_over.is_set():
            drawn.append(float(torch.rand(())))

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        for _ in range(20):
            featx.create_feature_extractor(model, ["block.1"], example_inputs=torch.ones(2, 3, 8, 8))
    finally:
        is_over.set()
        thread.join()
    torch.manual_seed(0)
    assert drawn == [float(torch.rand(())) for _ in drawn]


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="the system does not tell the time of each thread")
def test_threads_in_which_torch_computes_are_told_apart_from_those_of_python() -> None:
    x = torch.rand(1500, 1500)

    def have_run_beside_torch() -> bool:
        before = AllThreads()
        x @ x
        return before.have_run()

    assert not all(have_run_beside_torch() for _ in range(50))  # in some, a thread of the test runner may have
    before = AllThreads()
    other = threading.Thread(target=lambda: sum(range(2_000_000)))
    other.start()
    other.join()
    assert before.have_run()


class Block(nn.Module):
    """Is kept whole, and says which of its modules runs on values and which without."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sys.stdout.write(f"runs {id(self)} {x.device}\n")
        return self.norm(self.linear(x).mT).mT


def test_layouts_are_found_on_modules_that_are_not_those_of_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    # Runs at other sizes once changed attributes, statistics and version counters of the model, and put them back.
    model = nn.Sequential(nn.Linear(8, 8), Block(), nn.Linear(8, 4))
    extractor = featx.create_feature_extractor(model, ["2"], example_inputs=torch.rand(2, 5, 8))
    assert extractor.feature_info[0].layout == "NLC"
    runs = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("runs")]
    assert "meta" in {device for _, _, device in runs}
    assert str(id(model[1])) not in {module for _, module, _ in runs}


GATE = threading.Condition()


class Locks(nn.Module):
    """Takes a lock and lets it go, as code does that reads a file which others may write."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with GATE:
            GATE.notify_all()
        return x * 2


@pytest.mark.parametrize("is_alone", [True, False])
def test_a_lock_that_no_other_thread_may_want_hands_over_nothing(
    is_alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("featx.tracing.environment.profile_hook.is_only_thread", lambda: is_alone)
    model, x = Locks().eval(), torch.rand(2)
    if is_alone:
        assert torch.equal(featx.trace(model, x)(x), model(x))
    else:
        with pytest.raises(featx.TraceError, match="hands work to another thread or process"):
            featx.trace(model, x)


READS_OF_THE_GENERATOR = """
import gc, sys, threading
from featx.tracing.environment.generators import TorchGenerator

class Cycle:
    def __init__(self): self.itself = self
    def __del__(self):
        for _ in range(50): pass

def read():
    generator = TorchGenerator()
    for _ in range(5_000):
        Cycle()
        assert not generator.was_set()

gc.set_threshold(20)
sys.setswitchinterval(1e-5)
threads = [threading.Thread(target=read) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert gc.isenabled()
"""


@pytest.mark.slow
def test_a_garbage_collection_does_not_block_threads_that_read_the_generator():
    # torch.get_rng_state allocates its result while it holds the mutex of the generator; with it this hangs.
    subprocess.run([sys.executable, "-c", READS_OF_THE_GENERATOR], check=True, timeout=120)
