"""frames: what the calling code does with a value, read from its bytecode."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from sources import run_source

import featx
from featx.tracing.source.frames import describe, is_library_code, user_frame
from featx.tracing.source_uses.syntax_queries import is_assertion, is_type_question, unpacked_count


class Probe:
    """Notes what each question about it was asked for."""

    def __init__(self) -> None:
        self.counts: list[int | None] = []
        self.assertions: list[bool] = []
        self.type_questions: list[bool] = []

    def __iter__(self) -> Iterator[int]:
        count = unpacked_count(sys._getframe(1))
        self.counts.append(count)
        return iter(range(2 if count is None else count))

    def __bool__(self) -> bool:
        self.assertions.append(is_assertion(sys._getframe(1)))
        return True

    @property
    def __class__(self) -> type:
        self.type_questions.append(is_type_question(sys._getframe(1)))
        return int


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("a, b = probe", 2),
        ("[a, b] = probe", 2),
        ("(a, b, c), d = probe, 1", 3),
        ("[a + b + c + d for a, b, c, d in [probe]]", 4),
        ("for a, b in [probe]: pass", 2),
        ("a, *b = probe", None),
        ("for a in probe: pass", None),
        ("[a for a in probe]", None),
        ("max(*probe)", None),
        ("[*probe]", None),
        ("list(probe)", None),
    ],
)
def test_only_an_unpacking_into_names_has_a_count(source: str, count: int | None) -> None:
    probe = Probe()
    run_source(source, probe=probe)
    assert probe.counts == [count]


def test_count_is_right_when_python_has_specialised_the_code() -> None:
    probe = Probe()
    run_source("for _ in range(200):\n    a, b = probe", probe=probe)
    assert set(probe.counts) == {2}


def test_count_above_255_is_read_from_the_extended_argument() -> None:
    probe = Probe()
    run_source(f"{', '.join(f'a{number}' for number in range(300))} = probe", probe=probe)
    assert probe.counts == [300]


def test_two_unpackings_on_one_line_have_their_own_counts() -> None:
    first, second = Probe(), Probe()
    run_source("a, b = first; c, d, e = second", first=first, second=second)
    assert (first.counts, second.counts) == ([2], [3])


def ask_if(probe: Any) -> None:
    if probe:
        pass


def ask_if_not_raise(probe: Any) -> None:
    if not probe:
        raise AssertionError("as if it were an assert")


def ask_and(probe: Any) -> Any:
    return probe and 1


def ask_or(probe: Any) -> Any:
    return probe or 1


def ask_not(probe: Any) -> bool:
    return not probe


def ask_while(probe: Any) -> None:
    while probe:
        break


def ask_conditional(probe: Any) -> int:
    return 1 if probe else 2


def asked_in(source: str) -> list[bool]:
    """Run `source` on a probe; not written in this file, where pytest rewrites each assert."""
    probe = Probe()
    with contextlib.suppress(AssertionError):
        run_source(source, probe=probe)
    return probe.assertions


@pytest.mark.parametrize("source", ["assert probe", "assert probe, f'{1 + 1}'", "assert probe, (1, 2)"])
def test_assert_is_told_from_other_questions(source: str) -> None:
    assert asked_in(source) == [True]


@pytest.mark.slow
@pytest.mark.parametrize("code", [ask_if, ask_if_not_raise, ask_and, ask_or, ask_not, ask_while, ask_conditional, bool])
def test_other_questions_are_no_assertions(code: Callable[[Any], Any]) -> None:
    probe = Probe()
    code(probe)
    assert probe.assertions == [False]


@pytest.mark.parametrize("source", ["assert not probe", "assert probe or True", "assert probe and True"])
def test_assert_of_more_than_the_value_is_no_assertion_of_the_value(source: str) -> None:
    # Recorded as one, `assert a or b` would demand too much, and `assert not a` the opposite.
    assert asked_in(source) == [False]


def ask_isinstance(probe: Any) -> None:
    isinstance(probe, str)


def ask_isinstance_of_many(probe: Any) -> None:
    isinstance(probe, (str, float, list))


def ask_isinstance_in_an_expression(probe: Any) -> None:
    str(not isinstance(probe, str)) + str(1)


def ask_isinstance_over_lines(probe: Any) -> None:
    isinstance(
        probe,
        str,
    )


def ask_isinstance_second_in_line(probe: Any) -> None:
    isinstance(1, int) and isinstance(probe, str)


def ask_isinstance_in_generator(probe: Any) -> None:
    any(isinstance(item, str) for item in [probe])


@pytest.mark.parametrize(
    "code",
    [
        ask_isinstance,
        ask_isinstance_of_many,
        ask_isinstance_in_an_expression,
        ask_isinstance_over_lines,
        ask_isinstance_second_in_line,
        ask_isinstance_in_generator,
    ],
)
def test_isinstance_is_recognised(code: Callable[[Any], None]) -> None:
    probe = Probe()
    code(probe)
    assert set(probe.type_questions) == {True}


def ask_is_tensor(probe: Any) -> None:
    torch.is_tensor(probe)


def ask_match(probe: Any) -> None:
    match probe:
        case str():
            pass


@functools.singledispatch
def ask_dispatch(probe: Any) -> None:
    pass


@pytest.mark.parametrize("code", [ask_is_tensor, ask_match, ask_dispatch])
def test_other_ways_to_branch_on_the_type_are_recognised(code: Callable[[Any], None]) -> None:
    probe = Probe()
    code(probe)
    assert True in probe.type_questions


def ask_class(probe: Any) -> None:
    probe.__class__  # noqa: B018


def ask_class_beside_isinstance(probe: Any) -> None:
    isinstance(1, int) and probe.__class__


def ask_class_in_argument_of_isinstance(probe: Any) -> None:
    isinstance(probe.__class__, str)


@pytest.mark.parametrize("code", [ask_class, ask_class_beside_isinstance, ask_class_in_argument_of_isinstance])
def test_other_reads_of_the_class_are_not_taken_for_isinstance(code: Callable[[Any], None]) -> None:
    probe = Probe()
    code(probe)
    assert set(probe.type_questions) == {False}


def test_code_of_torch_and_of_the_tracer_is_library_code_and_a_test_is_not() -> None:
    assert is_library_code(torch.nn.Linear.forward.__code__)
    assert is_library_code(featx.Tracer.trace.__code__)
    assert not is_library_code(ask_if.__code__)


def test_code_of_python_itself_is_library_code_and_installed_packages_are_not() -> None:
    folder = os.path.dirname(os.__file__)
    assert is_library_code(contextlib.suppress.__enter__.__code__)
    assert not is_library_code(compile("1", f"{folder}/site-packages/models.py", "exec"))
    for frozen in (os.path.join, importlib.import_module("importlib._bootstrap")._find_and_load, Mapping.get):
        assert is_library_code(frozen.__code__)  # without a file, as Python starts with it
    assert not is_library_code(compile("1", "<frozen models>", "exec"))


def test_user_frame_is_the_innermost_frame_outside_the_library() -> None:
    frame = user_frame()
    assert frame is not None
    assert frame.f_code.co_name == "test_user_frame_is_the_innermost_frame_outside_the_library"


def test_description_has_file_line_function_and_the_expression() -> None:
    def place() -> str:
        return str(describe(sys._getframe())) + ""

    text = place()
    line = place.__code__.co_firstlineno + 1
    assert f"{__file__}:{line}, in place" in text
    assert "`" in text
    assert 'return str(describe(sys._getframe())) + ""`' in text


def test_description_without_a_frame_says_so() -> None:
    assert describe(None) == "at an unknown line"


def test_description_without_source_has_the_place_alone() -> None:
    namespace: dict[str, Any] = {"sys": sys, "describe": describe}
    exec(compile("text = describe(sys._getframe())", "<nowhere>", "exec"), namespace)
    assert namespace["text"] == "at <nowhere>:1, in <module>"
