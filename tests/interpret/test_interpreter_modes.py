"""What a run leaves behind: modes of gradients and autocast, as the generated code leaves them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.amp import autocast_mode

import featx
from featx import Graph, GraphModule, Interpreter
from featx.tracing.guards.guards import check_decision


class WithoutGradients(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor):
        with torch.no_grad():
            x = self.first(x)
        return self.second(x)


class InLowPrecision(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor):
        with torch.autocast("cpu", torch.bfloat16):
            x = self.first(x)
        return self.second(x.float())


X = torch.rand(2, 3)


def open_regions() -> int:
    count = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return count


@pytest.mark.parametrize("garbage_collect_values", [True, False])
@pytest.mark.parametrize("kind", [WithoutGradients, InLowPrecision])
def test_modes_are_switched_and_put_back(kind: type[nn.Module], garbage_collect_values: bool) -> None:
    model = kind()
    module = featx.trace(model, X)
    result = Interpreter(module, garbage_collect_values).run(X)
    assert torch.equal(result, model(X))
    result.sum().backward()
    gradients = [parameter.grad is not None for parameter in model.parameters()]
    assert gradients == [kind is InLowPrecision] * 2 + [True] * 2
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")
    assert open_regions() == 0


@pytest.mark.parametrize("garbage_collect_values", [True, False])
@pytest.mark.parametrize("kind", [WithoutGradients, InLowPrecision])
def test_modes_are_put_back_after_an_error(kind: type[nn.Module], garbage_collect_values: bool) -> None:
    modes: list[tuple[bool, bool]] = []

    class Watching(Interpreter):
        def call_module(self, target: Any, args: Any, kwargs: Any):
            modes.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))
            return super().call_module(target, args, kwargs)

    module = featx.trace(kind(), X)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        Watching(module, garbage_collect_values).run(torch.rand(2, 4))
    assert modes == [(False, False) if kind is WithoutGradients else (True, True)]
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")


def test_regions_are_left_from_the_inside_out_after_an_error() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    for dtype in (torch.bfloat16, torch.float16):
        graph.call_function(autocast_mode._enter_autocast, ("cpu", dtype, True, True))
    graph.output(graph.call_method("no_such_method", (x,)))
    with pytest.raises(AttributeError, match="no_such_method"):
        Interpreter(GraphModule(nn.Module(), graph)).run(X)
    assert not torch.is_autocast_enabled("cpu")
    assert open_regions() == 0


def test_caller_without_gradients_stays_without() -> None:
    module = featx.trace(WithoutGradients(), X)
    with torch.no_grad():
        assert not Interpreter(module).run(X).requires_grad
        assert not torch.is_grad_enabled()


def test_region_of_the_caller_is_not_left() -> None:
    module = featx.trace(InLowPrecision(), X)
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(RuntimeError):
            Interpreter(module).run(torch.rand(2, 4))
        assert torch.is_autocast_enabled("cpu")
        Interpreter(module).run(X)
        assert torch.is_autocast_enabled("cpu")
    assert not torch.is_autocast_enabled("cpu")


def test_graph_that_switches_modes_is_transformed_without_switching_them() -> None:
    for kind in (WithoutGradients, InLowPrecision):
        module = featx.trace(kind(), X)
        transformed = featx.Transformer(module).transform()
        assert transformed.code == module.code
        assert torch.equal(transformed(X), module(X))

    class Failing(featx.Transformer):
        def call_module(self, target: Any, args: Any, kwargs: Any):
            raise NotImplementedError(target)

    with pytest.raises(NotImplementedError, match="first"):
        Failing(featx.trace(InLowPrecision(), X)).transform()
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")


def test_mode_that_a_function_sets_for_good_stays_as_with_the_generated_code() -> None:
    graph = Graph()
    graph.placeholder("x")
    graph.output(graph.call_function(torch.set_grad_enabled, (False,)))
    module = GraphModule(nn.Module(), graph)
    for run in (module, Interpreter(module).run):
        try:
            run(X)
            assert not torch.is_grad_enabled()
        finally:
            torch.set_grad_enabled(True)


def test_guard_that_no_longer_holds_raises_in_both() -> None:
    class Branch(nn.Module):
        def forward(self, x: torch.Tensor):
            return x * 2 if x.shape[1] > 2 else x

    module = featx.trace(Branch(), X)
    assert any(node.target is check_decision for node in module.graph.nodes)
    assert torch.equal(Interpreter(module).run(X), X * 2)
    errors = []
    for run in (module, Interpreter(module).run, featx.Transformer(module).transform()):
        with pytest.raises(featx.SpecializationError) as caught:
            run(torch.rand(2, 2))
        errors.append(str(caught.value))
    assert errors[0] == errors[1] == errors[2]
