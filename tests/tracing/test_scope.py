"""intercept: the calls and reads of a replica come to handlers, and the model is as before, also for other threads."""

from __future__ import annotations

import copy
import io
import pickle
import random
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import featx
from featx.tracing.replica.interception import intercept
from featx.tracing.replica.replica import Replica

X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
PATIENCE = 30.0


class Block(nn.Module):
    """Runs `pause` in each forward call, which a test uses to act while a trace is under way."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.scale = nn.Parameter(torch.tensor([1.0, 2.0, 3.0, 4.0]))
        self.register_buffer("shift", torch.tensor([4.0, 3.0, 2.0, 1.0]))

    def forward(self, x: Any) -> Any:
        x = self.norm(self.linear(x))
        PAUSE.get(threading.get_ident(), lambda: None)()
        return x * self.scale + self.shift


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), nn.ReLU(), Block())
        self.head = nn.Linear(4, 2)

    def forward(self, x: Any) -> Any:
        return self.head(self.blocks(x))


# What a thread does in the middle of Block.forward.
PAUSE: dict[int, Callable[[], None]] = {}


def during_trace(model: nn.Module, action: Callable[[], Any]) -> Any:
    """Trace `model` in another thread, run `action` in this one while forward is under way, return its result."""
    inside, go_on = threading.Event(), threading.Event()
    errors: list[BaseException] = []

    def trace() -> None:
        PAUSE[threading.get_ident()] = lambda: (inside.set(), go_on.wait(PATIENCE))  # type: ignore[func-returns-value]
        try:
            featx.symbolic_trace(model)
        except BaseException as error:
            errors.append(error)
            inside.set()
        finally:
            PAUSE.pop(threading.get_ident(), None)

    thread = threading.Thread(target=trace)
    thread.start()
    try:
        assert inside.wait(PATIENCE)
        assert not errors
        return action()
    finally:
        go_on.set()
        thread.join(PATIENCE)
        assert not errors, errors


def test_another_thread_runs_the_same_model_while_it_is_traced() -> None:
    model = Net().eval()
    expected = model(X)
    assert torch.equal(during_trace(model, lambda: model(X)), expected)


def test_another_thread_runs_and_makes_other_models_during_a_trace() -> None:
    other = Net().eval()
    expected = other(X)

    def action() -> list[Any]:
        return [other(X), copy.deepcopy(other)(X), nn.Linear(4, 1)(X).shape]

    first, second, shape = during_trace(Net(), action)
    assert torch.equal(first, expected)
    assert torch.equal(second, expected)
    assert shape == (2, 1)


def test_another_thread_sees_parameters_and_gradients_of_the_model_that_is_traced() -> None:
    model = Net().eval()
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def action() -> Any:
        model(X).sum().backward()
        assert type(model.blocks[0].scale) is nn.Parameter
        return model.state_dict()

    found = during_trace(model, action)
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_change_that_another_thread_makes_during_a_trace_stays() -> None:
    model = Net()

    def action() -> None:
        model.blocks[0].scale = nn.Parameter(torch.full((4,), 7.0))
        model.blocks[0].register_parameter("extra", nn.Parameter(torch.ones(1)))
        model.head.to(torch.float64)

    during_trace(model, action)
    assert torch.equal(model.blocks[0].scale, torch.full((4,), 7.0))
    assert "extra" in dict(model.blocks[0].named_parameters())
    assert model.head.weight.dtype is torch.float64
    assert type(model.blocks[0]._parameters) is dict


def test_another_thread_may_draw_random_numbers_during_a_trace() -> None:
    # Data loading does; the trace must not take it for a draw of the model.
    assert 0 <= during_trace(Net(), lambda: random.random()) < 1


def save_and_load(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), save_and_load],
    ids=["deepcopy", "pickle", "torch.save"],
)
def test_copy_made_during_a_trace_is_an_ordinary_model(duplicate: Callable[[nn.Module], nn.Module]) -> None:
    model = Net().eval()
    expected = model(X)
    twin = during_trace(model, lambda: duplicate(model))
    assert torch.equal(twin(X), expected)
    for module in twin.modules():
        assert type(module._parameters) is dict
    with torch.no_grad():
        twin.head.weight.zero_()
    assert torch.equal(model(X), expected)


def test_two_threads_trace_one_model_at_once() -> None:
    model = Net()
    expected = str(featx.symbolic_trace(model).graph)
    barrier = threading.Barrier(2)
    found: list[str] = []

    def trace() -> None:
        PAUSE[threading.get_ident()] = lambda: (barrier.wait(PATIENCE), None)[1]  # type: ignore[func-returns-value]
        found.append(str(featx.symbolic_trace(model).graph))
        PAUSE.pop(threading.get_ident())

    threads = [threading.Thread(target=trace) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert found == [expected, expected]
    assert all("_call_impl" not in module.__dict__ for module in model.modules())
    assert all(type(module._parameters) is dict for module in model.modules())


def test_trace_goes_on_after_a_shorter_one_in_another_thread() -> None:
    model = Net()
    expected = str(featx.symbolic_trace(model).graph)
    found: list[str] = []

    def pause() -> None:
        PAUSE.pop(threading.get_ident())
        other = threading.Thread(target=lambda: found.append(str(featx.symbolic_trace(model).graph)))
        other.start()
        other.join(PATIENCE)

    PAUSE[threading.get_ident()] = pause
    found.append(str(featx.symbolic_trace(model).graph))
    assert found == [expected, expected]


def test_trace_of_a_part_inside_a_trace_leaves_the_outer_one_alone() -> None:
    # As a model does that makes an extractor of its backbone at the first call.
    model = Net()
    expected = str(featx.symbolic_trace(model).graph)

    def pause() -> None:
        PAUSE.pop(threading.get_ident())
        featx.symbolic_trace(model.blocks)

    PAUSE[threading.get_ident()] = pause
    assert str(featx.symbolic_trace(model).graph) == expected


def test_failing_trace_in_one_thread_leaves_the_other_trace_alone() -> None:
    model = Net()
    expected = str(featx.symbolic_trace(model).graph)

    def fail() -> None:
        raise ZeroDivisionError

    def pause() -> None:
        PAUSE.pop(threading.get_ident())
        thread = threading.Thread(target=failing)
        thread.start()
        thread.join(PATIENCE)

    def failing() -> None:
        PAUSE[threading.get_ident()] = fail
        with pytest.raises(ZeroDivisionError):
            featx.symbolic_trace(model)
        PAUSE.pop(threading.get_ident())

    PAUSE[threading.get_ident()] = pause
    assert str(featx.symbolic_trace(model).graph) == expected


@pytest.mark.parametrize("patched", [nn.Module, nn.Linear, Block, Net, torch.Tensor, nn.Sequential])
def test_no_class_is_patched_during_a_trace(patched: type) -> None:
    before = dict(vars(patched))
    model = Net()
    assert during_trace(model, lambda: dict(vars(patched))) == before


@pytest.mark.parametrize("module", [torch, nn.functional, nn, torch.nn.modules.module], ids=lambda m: m.__name__)
def test_no_function_of_torch_is_patched_during_a_trace(module: Any) -> None:
    before = dict(vars(module))
    after = during_trace(Net(), lambda: dict(vars(module)))
    assert {name for name in before if after[name] is not before[name]} == set()


def test_model_is_as_before_after_a_trace(snapshot: Callable[[nn.Module], Any]) -> None:
    model = Net()
    before = snapshot(model)
    featx.symbolic_trace(model)
    before.check()


def test_model_is_as_before_after_an_error(snapshot: Callable[[nn.Module], Any]) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    model = Net()
    before = snapshot(model)
    PAUSE[threading.get_ident()] = fail
    try:
        with pytest.raises(ZeroDivisionError):
            featx.symbolic_trace(model)
    finally:
        PAUSE.pop(threading.get_ident())
    before.check()


def test_model_that_was_compiled_runs_as_written_during_the_trace_and_compiled_after() -> None:
    model = Net().eval()
    model.head.compile(backend="eager")
    compiled = model.head._compiled_call_impl
    traced = featx.symbolic_trace(model)
    assert traced.graph.find_nodes(op="call_module", target="head")
    assert model.head._compiled_call_impl is compiled


def test_calls_and_parameter_reads_come_to_the_handlers() -> None:
    replica = Replica(Block())
    model: Any = replica.root
    calls: list[nn.Module] = []
    reads: list[str] = []

    def on_call(module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        calls.append(module)
        return forward(*args, **kwargs)

    def on_read(module: nn.Module, name: str, value: Any) -> Any:
        reads.append(name)
        return value

    intercept(replica.paths, on_call, on_read)
    model(X)
    assert calls == [model, model.linear, model.norm]
    assert "scale" in reads
    assert "shift" not in reads


def test_buffer_reads_come_to_the_handler_where_it_is_asked_for() -> None:
    replica = Replica(Block())
    reads: list[str] = []

    def on_read(module: nn.Module, name: str, value: Any) -> Any:
        reads.append(name)
        return value

    intercept(
        replica.paths,
        lambda module, forward, args, kwargs: forward(*args, **kwargs),
        on_read,
        watched=("_parameters", "_buffers"),
    )
    replica.root(X)
    assert "shift" in reads


def test_handler_may_answer_a_call_in_place_of_the_module() -> None:
    model = Net()
    replica = Replica(model)
    intercept(replica.paths, lambda module, *_: type(module).__name__, lambda module, name, value: value)
    assert replica.root(X) == "Net"
    assert model(X).shape == (2, 2)


@pytest.mark.slow
@pytest.mark.parametrize("tracer", ["example", "symbolic"])
def test_modules_that_are_nested_deeply(tracer: Any) -> None:
    model: nn.Module = nn.Linear(3, 3)
    for _ in range(150):  # of the 330 that a run of the model bears
        model = nn.Sequential(model)
    path, limit, x = ".".join(["0"] * 150), sys.getrecursionlimit(), torch.rand(2, 3)
    inputs = {"example_inputs": x} if tracer == "example" else {}
    extractor = featx.create_feature_extractor(model, [path], tracer=tracer, **inputs)
    assert torch.equal(extractor(x)[path], model(x))
    assert sys.getrecursionlimit() == limit
