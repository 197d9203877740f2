"""What all tests share: goldens, refreshed by `pytest --update-goldens`, and `pytest --one-case`."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

_FOLDER = Path(__file__).parent / "golden"

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # there is a process for each core


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-goldens", action="store_true", help="write what the code does now into tests/golden")
    parser.addoption("--one-case", action="store_true", help="run the first case alone of each test that has several")


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make the first case alone of what `parametrize` lists, with `--one-case`: one that `-m` does not leave out."""
    if not metafunc.config.getoption("--one-case"):
        return
    parametrize: Callable[..., None] = metafunc.parametrize

    def first_alone(argnames: Any, argvalues: Iterable[Any], *args: Any, ids: Any = None, **kwargs: Any) -> None:
        values = list(argvalues)
        place = next((place for place, value in enumerate(values) if not _is_left_out(value)), 0)
        one = slice(place, place + 1)
        ids = ids if ids is None or callable(ids) else list(ids)[one]
        parametrize(argnames, values[one], *args, ids=ids, **kwargs)

    metafunc.parametrize = first_alone  # type: ignore[method-assign]


def _is_left_out(value: Any) -> bool:
    return any(mark.name in ("slow", "sweep", "fuzzing") for mark in getattr(value, "marks", ()))


def pytest_collection_finish() -> None:
    """Take what is imported by now out of garbage collection, which goes through all of it again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def frozen() -> Iterator[None]:
    """Do the same with what a file of tests leaves, such as parsed code of libraries: seconds for each collection."""
    yield
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Let the end of the process collect it after all."""
    gc.unfreeze()


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """A function that compares a text with the golden of this name, or writes it there with --update-goldens."""

    def compare(name: str, text: str) -> None:
        path = _FOLDER / f"{name}.txt"
        if request.config.getoption("--update-goldens"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
            return
        assert path.exists(), f"no golden {path.name}; write it with --update-goldens and read it"
        assert text == path.read_text()

    return compare


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Give every test the same random numbers: an unlucky draw (all zeros after a relu) proves nothing."""
    torch.manual_seed(7)
