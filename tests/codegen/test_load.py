from __future__ import annotations

import gc
import inspect
import linecache
import traceback
from typing import Any

import pytest

from featx.codegen.load import load_function

SOURCE = "\n\n\ndef forward(self, x):\n    y = x + offset\n    return y / 0\n"


def entries() -> set[str]:
    return {name for name in linecache.cache if name.startswith("<featx")}


def test_function_runs_with_its_globals() -> None:
    function = load_function("def forward(self, x):\n    return x + offset\n", {"offset": 3})
    assert function(None, 4) == 7


def test_other_name_may_be_loaded() -> None:
    assert load_function("def answer():\n    return 42\n", {}, "answer")() == 42


def test_globals_of_the_caller_are_not_changed() -> None:
    given: dict[str, Any] = {"offset": 3}
    load_function(SOURCE, given)
    assert given == {"offset": 3}


def test_globals_are_looked_up_when_the_function_was_loaded() -> None:
    given = {"offset": 3}
    function = load_function("def forward():\n    return offset\n", given)
    given["offset"] = 5
    assert function() == 3


def test_traceback_shows_the_line_that_raised() -> None:
    function = load_function(SOURCE, {"offset": 3})
    with pytest.raises(ZeroDivisionError) as caught:
        function(None, 1)
    frame = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert (frame.line, frame.lineno, frame.name) == ("return y / 0", 6, "forward")


def test_source_of_the_function_can_be_asked_for() -> None:
    assert inspect.getsource(load_function(SOURCE, {})) == SOURCE.lstrip("\n")


def test_source_is_still_there_after_linecache_was_checked() -> None:
    function = load_function(SOURCE, {})
    linecache.checkcache()
    assert inspect.getsource(function) == SOURCE.lstrip("\n")


def test_equal_text_has_one_entry_and_other_text_another() -> None:
    first = load_function(SOURCE, {})
    before = entries()
    again = load_function(SOURCE, {"offset": 1})
    assert entries() == before
    other = load_function(SOURCE + "# more\n", {})
    assert len(entries()) == len(before) + 1
    assert first.__code__.co_filename == again.__code__.co_filename != other.__code__.co_filename


def test_text_that_is_no_python_raises_a_syntax_error() -> None:
    with pytest.raises(SyntaxError):
        load_function("def forward(:\n", {})


def test_source_goes_with_the_last_function_that_was_loaded_from_it() -> None:
    before, source = entries(), SOURCE.replace("offset", "amount")
    first, other = load_function(source, {"amount": 3}), load_function(source, {"amount": 3})
    del first
    gc.collect()
    assert inspect.getsource(other) == source.lstrip("\n")
    with pytest.raises(ZeroDivisionError) as caught:
        other(None, 1)
    del other
    gc.collect()
    assert traceback.extract_tb(caught.value.__traceback__)[-1].line == "return y / 0"
    del caught
    gc.collect()
    assert entries() <= before
