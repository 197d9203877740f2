"""An interrupt at any call of a trace reaches the caller and leaves nothing after."""

from __future__ import annotations

import builtins
import gc
import random
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import featx
from featx.tracing.environment import thread_modes

INTERRUPTS = 8  # of each entry point, at calls that are drawn from all
X = torch.rand(3, 8, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.config = {"sizes": [1, 2, {"width": 8}]}
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.config["sizes"][2]["width"] = 8
        with torch.no_grad():
            y = x * 2
        return torch.relu(self.norm(self.linear(x))) + y


class Net(nn.Module):
    def __init__(self, needs_values: bool) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        self.dropout = nn.Dropout(0.1)
        self.needs_values = needs_values

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks(x)
        if self.needs_values and x.sum() > -1e9:
            x = x + 0
        return self.dropout(x)


Entry = Callable[[nn.Module], Any]
ENTRIES: dict[str, Entry] = {
    "names": lambda model: featx.get_graph_node_names(model, example_inputs=X),
    "extractor": lambda model: featx.create_feature_extractor(model, ["blocks.0.norm", "blocks"], example_inputs=X),
    "trace": lambda model: featx.trace(model, X),
    "symbolic": lambda model: featx.symbolic_trace(model),
}


def state_of(model: nn.Module) -> Any:
    """Return all that an interrupt could leave changed: in the model, the thread, Python modules and builtins."""
    held = [(name, id(value)) for module in model.modules() for name, value in vars(module).items()]
    inside = [
        id(value) for module in model.modules() for held in (module._parameters, module._modules) for value in held
    ]
    values = [tensor.tolist() for tensor in (*model.parameters(), *model.buffers())]
    stacks = torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch._C._is_torch_function_enabled()
    names = [{name: id(value) for name, value in vars(each).items()} for each in (sys.modules[__name__], builtins)]
    return held, inside, values, stacks, modes, names


def calls_of(action: Callable[[], Any]) -> int:
    """Return how many calls of Python and C functions `action` makes."""
    number = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal number
        number += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        action()
    finally:
        sys.setprofile(None)
    return number


def interrupt(action: Callable[[], Any], at: int) -> bool:
    """Run `action`, raise at its call number `at`, and say whether that came out of it.

    Fails where `action` makes fewer calls.
    """
    number = 0

    def raise_there(frame: FrameType, event: str, argument: object) -> None:
        nonlocal number
        number += event in ("call", "c_call")
        if number == at:
            number += 1
            raise KeyboardInterrupt

    sys.setprofile(raise_there)
    try:
        action()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
    assert number > at, "nothing was raised: the action has made fewer calls than it did before"
    return False


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    """Keep the garbage of other tests out of the count: the callbacks of its weak references are calls too."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


# An exception in the callback of a weak reference or in `__del__` is reported by Python and raised nowhere.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("no_garbage_collection")
@pytest.mark.parametrize("name", ENTRIES)
@pytest.mark.parametrize("needs_values", [False, True], ids=["without values", "for real"])
def test_interrupt_at_any_call_reaches_the_caller_and_leaves_nothing_behind(
    name: str, needs_values: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "symbolic" and needs_values:
        pytest.skip("a symbolic trace has no values")
    model = Net(needs_values).train()
    model(X)
    entry = ENTRIES[name]
    entry(model)
    total = min(calls_of(lambda: entry(model)) for _ in range(3))  # the first ones may read sources
    before = state_of(model)
    places = random.Random(0)
    swallowed: list[Any] = []  # by Python, in the callback of a weak reference
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: swallowed.append(unraisable.exc_type))
    for _ in range(INTERRUPTS):
        at = places.randrange(1, total)
        assert interrupt(lambda: entry(model), at) or swallowed.pop() is KeyboardInterrupt, at
        assert state_of(model) == before, at
    entry(model)


@pytest.mark.parametrize("name", ENTRIES)
def test_trace_runs_no_code_of_the_threading_module_whose_locks_an_interrupt_could_leave_taken(name: str) -> None:
    model, found, is_over = Net(needs_values=False).train(), set[str](), threading.Event()
    other = threading.Thread(target=is_over.wait)
    other.start()

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename == threading.__file__:
            found.add(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        ENTRIES[name](model)
    finally:
        sys.setprofile(None)
        is_over.set()
        other.join()
    assert not found


class Normed(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.layer_norm(x, (8,))


@pytest.mark.parametrize("entry", ["trace", "symbolic"])
def test_interrupt_inside_a_context_manager_of_torch_leaves_no_mode_behind(entry: str) -> None:
    # torch leaves its mode for a moment, and the generator that does it puts the mode back when it is freed.
    def raise_there(frame: FrameType, event: str, argument: object) -> None:
        caller = frame.f_back
        is_exit = event == "call" and frame.f_code.co_name == "__exit__"
        if is_exit and caller is not None and caller.f_code.co_name == "handle_torch_function":
            raise KeyboardInterrupt

    before = torch._C._len_torch_function_stack()
    sys.setprofile(raise_there)
    try:
        with pytest.raises(KeyboardInterrupt):
            ENTRIES[entry](Normed())
    finally:
        sys.setprofile(None)
    assert torch._C._len_torch_function_stack() == before
    assert (torch.rand(2) + 1).shape == (2,)


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_trace_that_is_not_interrupted_does_not_search_all_objects(
    entry: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Which takes as long as the trace of a small model.
    found: list[Any] = []
    monkeypatch.setattr(thread_modes.gc, "get_referrers", lambda *objects: found.append(objects) or [])
    ENTRIES[entry](Net(needs_values=False).eval())
    assert not found


@pytest.mark.parametrize(
    "stack", [("__init__", "does_the_same_again"), ("put_back_tensors", "__init__")], ids=" in ".join
)
def test_interrupt_ahead_of_a_further_call_of_a_replica_reaches_the_caller(stack: tuple[str, str]) -> None:
    class Flattening(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.view(x.shape[0], -1) * 2

    def raise_there(frame: FrameType, event: str, argument: object) -> None:
        caller = frame.f_back
        if event == "call" and caller is not None and (frame.f_code.co_name, caller.f_code.co_name) == stack:
            raise KeyboardInterrupt

    sys.setprofile(raise_there)
    try:
        with pytest.raises(KeyboardInterrupt):
            featx.create_feature_extractor(Flattening(), ["mul"], example_inputs=X)
    finally:
        sys.setprofile(None)


class Switching(nn.Module):
    """Has a module call inside a context whose end the trace hears."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            x = self.inner(x)
        return x * 2


class Interrupted(nn.Module):
    """Is interrupted in the run that `LEFT` counts down to."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if LEFT() == 0:
            raise KeyboardInterrupt
        return x + 1


LEFT: Callable[[], int] = iter(()).__next__


@pytest.mark.parametrize("run", [0, 1])
def test_interrupt_reaches_the_caller_through_contexts_that_the_trace_hears(
    run: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "LEFT", iter(range(run, -100, -1)).__next__)
    with pytest.raises(KeyboardInterrupt):
        featx.trace(Switching(nn.Sequential(Interrupted())), X)
