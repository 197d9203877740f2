"""What an error says of the node that raised it."""

from __future__ import annotations

import inspect
import traceback
from typing import Any

import pytest
import torch
from torch import nn

import featx
from featx import Graph, GraphModule, Interpreter, symbolic_trace


class Inner(nn.Module):
    def forward(self, x: torch.Tensor):
        return x.view(3, -1)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: torch.Tensor):
        return self.inner(x + 1)


GOOD, BAD = torch.rand(6), torch.rand(7)
LINE = inspect.getsourcelines(Inner)[1] + 2
VIEW = "%view : [num_users=1] = call_method[target=view](args = (%add, 3, -1), kwargs = {})"


def failing(error: BaseException) -> GraphModule:
    """Return a module whose one node raises this error."""

    def fail(value: Any) -> None:
        raise error

    graph = Graph()
    graph.output(graph.call_function(fail, (graph.placeholder("x"),)))
    return GraphModule(nn.Module(), graph)


def notes_of(error: BaseException) -> list[str]:
    return error.__notes__


def has_note(error: BaseException) -> bool:
    return hasattr(error, "__notes__")


def test_note_names_the_node_its_module_and_its_line_in_the_model() -> None:
    interpreter = Interpreter(featx.trace(Model(), GOOD))
    with pytest.raises(RuntimeError) as caught:
        interpreter.run(BAD)
    with pytest.raises(RuntimeError) as eager:
        Model()(BAD)
    assert str(caught.value) == str(eager.value)
    assert type(caught.value) is type(eager.value)
    assert notes_of(caught.value) == [
        f"While executing {VIEW}\nin module 'inner' (Inner), named 'inner.view'\n"
        f"at {__file__}:{LINE}: `return x.view(3, -1)`"
    ]


def test_note_of_a_symbolic_trace_names_the_module() -> None:
    with pytest.raises(RuntimeError) as caught:
        Interpreter(symbolic_trace(Model())).run(BAD)
    assert notes_of(caught.value) == [f"While executing {VIEW}\nin module 'inner' (Inner), named 'inner.view'"]


def test_note_quotes_what_the_tracer_recorded_of_the_stack() -> None:
    class Recording(featx.Tracer):
        record_stack_traces = True

    graph = Recording().trace(Model())
    with pytest.raises(RuntimeError) as caught:
        Interpreter(Model(), graph=graph).run(BAD)
    (note,) = notes_of(caught.value)
    assert f"{__file__}:{LINE}, in forward: `" in note


@pytest.mark.parametrize("source", ["elsewhere.py:3", "written by hand"])
def test_source_that_cannot_be_read_is_named_only(source: str) -> None:
    module = symbolic_trace(Model())
    next(node for node in module.graph.nodes if node.name == "view").meta["source"] = source
    with pytest.raises(RuntimeError) as caught:
        Interpreter(module).run(BAD)
    assert notes_of(caught.value)[0].endswith(f"\nat {source}")


def test_note_of_a_node_that_no_tracer_made_is_its_line() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        Interpreter(failing(ZeroDivisionError("none"))).run(1)
    (note,) = notes_of(caught.value)
    assert note.startswith("While executing %fail : [num_users=1] = call_function[target=")
    assert "\n" not in note


@pytest.mark.parametrize(
    "error", [KeyError("name"), OSError(2, "no such file", "x.txt"), UnicodeDecodeError("utf-8", b"x", 0, 1, "bad")]
)
def test_error_stays_the_object_that_was_raised(error: Exception) -> None:
    args = error.args
    with pytest.raises(type(error)) as caught:
        Interpreter(failing(error)).run(1)
    assert caught.value is error
    assert error.args == args
    assert traceback.extract_tb(error.__traceback__)[-1].name == "fail"


def test_errors_that_end_the_program_are_left_alone() -> None:
    error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        Interpreter(failing(error)).run(1)
    assert not has_note(error)


def test_extra_traceback_switches_notes_off() -> None:
    interpreter = Interpreter(symbolic_trace(Model()))
    interpreter.extra_traceback = False
    with pytest.raises(RuntimeError) as caught:
        interpreter.run(BAD)
    assert not has_note(caught.value)


def test_subclass_that_fails_while_a_graph_is_transformed_gets_the_note_too() -> None:
    class Deciding(featx.Transformer):
        def call_method(self, target: Any, args: Any, kwargs: Any):
            return args[0] if args[0] > 0 else None

    with pytest.raises(featx.ControlFlowError, match="cannot trace Model") as caught:
        Deciding(symbolic_trace(Model())).transform()
    assert VIEW in notes_of(caught.value)[0]


def test_note_is_printed_with_the_error() -> None:
    with pytest.raises(RuntimeError) as caught:
        Interpreter(symbolic_trace(Model())).run(BAD)
    assert traceback.format_exception(caught.value)[-2].startswith(f"While executing {VIEW}")
