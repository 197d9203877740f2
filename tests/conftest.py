"""What all tests share: goldens, refreshed by `pytest --update-goldens`, and `pytest --one-case`."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

_FOLDER = Path(__file__).parent / "golden"

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # there is a process for each core


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-goldens", action="store_true", help="write what the code does now into tests/golden")
    parser.addoption("--one-case", action="store_true", help="run the first case alone of each test that has several")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out all but the first case of each test with `--one-case`; comes after `-m`, which leaves out others."""
    if not config.getoption("--one-case"):
        return
    kept = set({item.nodeid.partition("[")[0]: item for item in reversed(items)}.values())
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


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
