"""How an Interpreter takes inputs: as the model does, by position and by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from featx import Graph, GraphModule, Interpreter, symbolic_trace
from featx.errors import InputError

X, Y, Z = torch.tensor([1.0]), torch.tensor([10.0]), torch.tensor([100.0])


def plain(x: Any, y: Any = 2.0) -> Any:
    return x - y


def keyword_only(x: Any, *, scale: Any = 3.0, shift: Any) -> Any:
    return x * scale - shift


def rest(x: Any, *others: Any) -> Any:
    return x - others[0] * others[1]


def options(x: Any, **others: Any) -> Any:
    return x - others["a"] * others["b"]


def everything(x: Any, y: Any = 2.0, *others: Any, scale: Any = 3.0, **more: Any) -> Any:
    return (x - y * scale, others, more)


CALLS = [
    (plain, (X, Y), {}),
    (plain, (X,), {}),
    (plain, (X,), {"y": Y}),
    (plain, (), {"y": Y, "x": X}),
    (keyword_only, (X,), {"shift": Y}),
    (keyword_only, (X,), {"shift": Y, "scale": Z}),
    (rest, (X, Y, Z), {}),
    (rest, (X, Y, Z, Z), {}),
    (options, (X,), {"a": Y, "b": Z}),
    (options, (), {"a": Y, "b": Z, "x": X}),
    (everything, (X,), {}),
    (everything, (X, Y, Z, Z), {"scale": Z, "a": Y}),
    (everything, (X,), {"y": Y, "b": Z}),
]


@pytest.mark.parametrize(("function", "args", "kwargs"), CALLS)
def test_inputs_are_taken_as_the_function_takes_them(function: Any, args: Any, kwargs: Any) -> None:
    module = symbolic_trace(function)
    expected = function(*args, **kwargs)
    assert module(*args, **kwargs) == expected
    assert Interpreter(module).run(*args, **kwargs) == expected


def test_keyword_only_inputs_may_be_given_by_position_as_with_torch_fx() -> None:
    def shifted(x: Any, *, shift: Any) -> Any:
        return x - shift

    expected = torch.fx.Interpreter(torch.fx.symbolic_trace(shifted)).run(X, Y)
    assert Interpreter(symbolic_trace(shifted)).run(X, Y) == expected == X - Y


def test_boxed_run_takes_one_value_for_each_placeholder() -> None:
    arguments = [X, Y, (Z, Z), 2.0, {"a": X}]
    assert Interpreter(symbolic_trace(everything)).boxed_run(arguments) == (X - Y * 2.0, (Z, Z), {"a": X})


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "message"),
    [
        (plain, (), {}, "'x' is not given"),
        (plain, (), {"y": Y}, "'x' is not given"),
        (plain, (X, Y, Z), {}, "3 are given by position"),
        (plain, (X,), {"z": Z, "w": Z}, "'z', 'w' is none of them"),
        (plain, (X,), {"x": Z}, "'x' is given by position and by name"),
        (keyword_only, (X,), {}, "'shift' is not given"),
        (keyword_only, (X, Y, Z, Z), {}, "4 are given by position"),
        (keyword_only, (X, Y), {"scale": Z}, "'scale' is given by position and by name"),
        (options, (X, Y), {}, "2 are given by position"),
        (rest, (X, Y, Z), {"others": Y}, "'others' is none of them"),
    ],
)
def test_wrong_inputs_are_refused(function: Any, args: Any, kwargs: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Interpreter(symbolic_trace(function)).run(*args, **kwargs)


def test_error_names_the_model_and_its_inputs() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None, *others: Any, scale: torch.Tensor):
            return x * scale

    with pytest.raises(InputError) as caught:
        Interpreter(symbolic_trace(Model())).run()
    assert (
        str(caught.value) == "the graph of Model takes the inputs x, mask (optional), *others, scale: 'x' is not given"
    )
    # What callers of torch.fx, and of functions, catch.
    assert isinstance(caught.value, RuntimeError)
    assert isinstance(caught.value, TypeError)


def test_too_many_inputs_are_refused_before_anything_runs() -> None:
    ran: list[Any] = []
    graph = Graph()
    graph.placeholder("x")
    graph.output(graph.call_function(ran.append, (1,)))
    with pytest.raises(InputError, match="2 are given by position"):
        Interpreter(GraphModule(nn.Module(), graph)).run(X, Y)
    assert ran == []


@pytest.mark.parametrize("values", [[], [X], [X, Y, Z]])
def test_boxed_run_refuses_another_number_of_values_and_leaves_the_list(values: list[Any]) -> None:
    arguments = list(values)
    message = f"takes the inputs x, y .optional.: {len(values)} values are given for these 2"
    with pytest.raises(InputError, match=message):
        Interpreter(symbolic_trace(plain)).boxed_run(arguments)
    assert arguments == values


def test_inputs_in_initial_env_are_not_asked_for() -> None:
    module = symbolic_trace(plain)
    x, y = list(module.graph.nodes)[:2]
    assert Interpreter(module).run(Y, initial_env={x: X}) == X - Y
    assert Interpreter(module).run(X, initial_env={y: Y}) == X - Y
    assert Interpreter(module).run(y=Y, initial_env={x: X}) == X - Y
    with pytest.raises(InputError, match="2 are given by position"):
        Interpreter(module).run(X, Y, initial_env={x: X})


def test_subclass_that_makes_its_own_inputs_needs_none() -> None:
    class Fake(Interpreter):
        def placeholder(self, target: Any, args: Any, kwargs: Any):
            return {"x": X, "y": Y}[target]

    assert Fake(symbolic_trace(plain)).run() == X - Y


def test_subclass_takes_inputs_from_args_iter_as_with_torch_fx() -> None:
    class Doubling(Interpreter):
        def placeholder(self, target: Any, args: Any, kwargs: Any):
            return next(self.args_iter) * 2

    assert Doubling(symbolic_trace(plain)).run(X, Y) == 2 * X - 2 * Y


def test_inputs_of_an_earlier_run_are_forgotten() -> None:
    interpreter = Interpreter(symbolic_trace(everything))
    interpreter.run(X, Y, Z, a=Z)
    assert interpreter.run(X) == everything(X)
    with pytest.raises(InputError, match="'x' is not given"):
        interpreter.run()


def test_io_processing_is_accepted_and_changes_nothing() -> None:
    interpreter = Interpreter(symbolic_trace(plain))
    assert (
        interpreter.run(X, Y, enable_io_processing=False) == interpreter.run(X, Y, enable_io_processing=True) == X - Y
    )
