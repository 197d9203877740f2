"""Every string that a graph holds gets into generated code as the text that it is, or is refused; none runs as code."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from featx import FeatxError, GraphModule
from tests.hostile import (
    HOSTILE,
    PLACES,
    TEXTS,
    UNUSUAL,
    Case,
    Loud,
    is_plain,
    method,
    nothing_runs,
    placeholder,
    rest_of_inputs,
)


def check(place: Callable[[str], Case], text: str) -> None:
    """Build the graph, run it, and execute all that is written for people to read."""
    case, refusal = None, None
    with nothing_runs():
        try:
            case = place(text)
            module = GraphModule(case.root, case.graph, case.class_name)
            result = module(**case.inputs)
            written = [case.graph.python_code("self", verbose=True).src, module.print_readable(False)]
        except FeatxError as error:
            refusal = error
        else:
            assert result == case.expected
            for source in written:
                exec(source, {**module.recompile().globals})
    if refusal is not None:
        must_work = not is_refused_when_made(place, text) if case is None else case.works
        assert not must_work, f"{text!r} is refused: {refusal}"


def is_refused_when_made(place: Callable[[str], Case], text: str) -> bool:
    if place is method:
        return not text.isidentifier()
    return place in (placeholder, rest_of_inputs) and not is_plain(text.lstrip("*") if place is placeholder else text)


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
@pytest.mark.parametrize("texts", [HOSTILE, UNUSUAL], ids=["hostile", "unusual"])
def test_text_is_read_as_it_is_or_refused(place: Callable[[str], Case], texts: list[str]) -> None:
    for text in texts:
        check(place, text)


@pytest.mark.slow
@given(st.sampled_from(PLACES), TEXTS)
@settings(max_examples=400, deadline=None)
def test_random_text_is_read_as_it_is_or_refused(place: Callable[[str], Case], text: str) -> None:
    check(place, text)


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_string_that_prints_as_another_text_is_read_as_what_it_holds_or_refused(place: Callable[[str], Case]) -> None:
    for shown in HOSTILE:
        for text in ("x", "a b", "class"):
            loud = Loud(text, shown)
            with nothing_runs():
                try:
                    case = place(loud)
                    result = GraphModule(case.root, case.graph, case.class_name)(**case.inputs)
                    assert result == case.expected
                    exec(case.graph.python_code("self", verbose=True).src, {"torch": torch})
                except (FeatxError, NameError):  # NameError: exec() of code that refers to globals
                    pass
