"""to_torch_fx: the code of torch.fx reads each string that a graph holds as what it is, or the graph is refused."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import featx
from tests.hostile import (
    HOSTILE,
    PAYLOAD,
    PLACES,
    TEXTS,
    UNUSUAL,
    Case,
    Loud,
    annotation,
    class_name,
    key_of_item,
    key_of_written_item,
    meta,
    name_of_function,
    name_of_node,
    nothing_runs,
    text_as_default,
    text_in_arguments,
)

MARK = "# COUNTER: 0"
ALWAYS_TAKEN = (
    annotation, class_name, key_of_item, key_of_written_item, meta, name_of_function, name_of_node,
    text_as_default, text_in_arguments,
)  # fmt: skip


def check(place: Callable[[str], Case], text: str) -> str:
    """Convert the graph, there and back, and run it; return why it was refused, if it was."""
    with nothing_runs():
        try:
            case = place(text)
            module = featx.GraphModule(case.root, case.graph, case.class_name)
            converted = featx.to_torch_fx(module)
        except featx.FeatxError as error:
            return str(error)
        assert converted(**case.inputs) == case.expected
        assert featx.from_torch_fx(converted)(**case.inputs) == case.expected
        with contextlib.suppress(featx.FeatxError):
            compile(featx.to_torch_fx(case.graph).python_code("self").src, "<torch.fx>", "exec")
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
@pytest.mark.parametrize("texts", [HOSTILE, UNUSUAL], ids=["hostile", "unusual"])
def test_text_is_read_as_it_is_or_refused(place: Callable[[str], Case], texts: list[str]) -> None:
    for text in texts:
        refusal = check(place, text)
        assert not refusal or place not in ALWAYS_TAKEN or MARK in text or text == "self", (
            f"{text!r} is refused: {refusal}"
        )


@pytest.mark.slow
@given(st.sampled_from(PLACES), TEXTS)
@settings(max_examples=200, deadline=None)
def test_random_text_is_read_as_it_is_or_refused(place: Callable[[str], Case], text: str) -> None:
    check(place, text)


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_string_that_prints_as_another_text_is_read_as_what_it_holds_or_refused(place: Callable[[str], Case]) -> None:
    for shown in HOSTILE:
        check(place, Loud("x", shown))


def refusal_of(build: Callable[[featx.Graph], Any], root: nn.Module | None = None) -> str:
    graph = featx.Graph()
    graph.output(build(graph))
    with pytest.raises(featx.ArgumentTypeError) as caught, nothing_runs():
        featx.to_torch_fx(featx.GraphModule(root or nn.Module(), graph))
    return str(caught.value)


def test_refusal_names_the_node_and_the_name() -> None:
    assert "node 'dict_1': its code cannot pass the keyword 'a b'" in refusal_of(
        lambda graph: graph.call_function(dict, (), {"a b": 1})
    )
    assert "node 'class_1': its code cannot call the method 'class'" in refusal_of(
        lambda graph: graph.call_method("class", (1,))
    )
    assert "its code cannot read the attribute at 'a\\nb'" in refusal_of(
        lambda graph: graph.call_module("a\nb", (1,)), nn.ModuleDict({"a\nb": nn.Identity()})
    )
    kind = type("Kind", (), {"__module__": f"torch.({PAYLOAD})"})
    assert "its code has no name for the type" in refusal_of(lambda graph: graph.placeholder("x", kind))
    kind = type("Kind", (), {"__module__": f"torch.({PAYLOAD})"})
    assert "its code has no name for the type" in refusal_of(lambda graph: graph.placeholder("x", list[kind]))


def test_string_that_torch_fx_takes_for_its_own_mark_is_kept() -> None:
    graph = featx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(dict, (), {"text": f"a {MARK}", "x": x}), [MARK.encode(), f"{MARK}"]))
    module = featx.GraphModule(nn.Module(), graph)
    assert featx.to_torch_fx(module)(1) == module(1) == ({"text": f"a {MARK}", "x": 1}, [MARK.encode(), MARK])


def test_string_that_reads_like_a_switch_of_modes_is_kept() -> None:
    text = "torch.amp.autocast_mode._exit_autocast(x)"
    graph = featx.Graph()
    x = graph.placeholder("x")
    enter = graph.call_function(torch.amp.autocast_mode._enter_autocast, ("cpu", torch.bfloat16, True, False))
    graph.call_function(torch.amp.autocast_mode._exit_autocast, (enter,))
    graph.output((graph.call_function(dict, (), {"text": text}), x))
    module = featx.GraphModule(nn.Module(), graph)
    assert featx.to_torch_fx(module)(1) == module(1) == ({"text": text}, 1)


def test_function_that_says_it_is_an_operator_is_called_itself() -> None:
    def add(x: Any, y: Any) -> str:
        return "called"

    add.__module__ = "_operator"
    graph = featx.Graph()
    graph.output(graph.call_function(add, (graph.placeholder("x"), 2)))
    assert featx.to_torch_fx(featx.GraphModule(nn.Module(), graph))(1) == "called"


def test_overload_whose_name_is_a_keyword_is_called() -> None:
    function = getattr(torch.ops.aten.random, "from")
    graph = featx.Graph()
    graph.output(graph.call_function(function, (graph.placeholder("x"), 3, 4)))
    module = featx.GraphModule(nn.Module(), graph)
    for runs in (module, featx.to_torch_fx(module)):
        assert runs(torch.zeros(2)).tolist() == [3, 3]
