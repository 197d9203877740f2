"""Plain values that a module leaves for others outside of its own attributes, while one of them is kept whole."""

from __future__ import annotations

import contextvars
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import featx

INFO: dict[str, Any] = {}
SIZES: list[int] = []
LOCAL = threading.local()
GRID: contextvars.ContextVar[int] = contextvars.ContextVar("grid", default=0)
BY_MODULE: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()


def note(info: dict[str, Any], y: torch.Tensor) -> None:
    info["v"] = y.shape[2]


class Writer(nn.Module):
    size = 0

    def __init__(self, context: Any) -> None:
        super().__init__()
        self.conv, self.context, self.info = nn.Conv2d(3, 4, 2, 2), context, {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        self.leave(y)
        return y

    def leave(self, y: torch.Tensor) -> None:
        self.context["v"] = y.shape[2]

    def get(self) -> Any:
        return self.context["v"]


class WritesBatch(Writer):
    def leave(self, y: torch.Tensor) -> None:
        self.context.update(v=y.shape[0])


class WritesItem(Writer):
    def leave(self, y: torch.Tensor) -> None:
        self.context["v"] = y.abs().max().item()


class WritesBool(Writer):
    def leave(self, y: torch.Tensor) -> None:
        self.context["v"] = 2 if y.mean() > 0 else 3


class WritesByHelper(Writer):
    def leave(self, y: torch.Tensor) -> None:
        note(self.context, y)


class WritesOwnByHelper(Writer):
    def leave(self, y: torch.Tensor) -> None:
        note(self.info, y)

    def get(self) -> Any:
        return self.info["v"]


class WritesObject(Writer):
    def __init__(self, context: Any) -> None:
        super().__init__(context)
        context["of"] = self.shared = context.get("of", SimpleNamespace(h=None))

    def leave(self, y: torch.Tensor) -> None:
        self.shared.h = y.shape[2]

    def get(self) -> Any:
        return self.context["of"].h


SHARED = [WritesBatch, WritesItem, WritesBool, WritesByHelper, WritesOwnByHelper, WritesObject, Writer]


class WritesGlobal(Writer):
    def leave(self, y: torch.Tensor) -> None:
        INFO["h"] = y.shape[2]

    def get(self) -> Any:
        return INFO["h"]


class WritesClass(Writer):
    def leave(self, y: torch.Tensor) -> None:
        type(self).size = y.shape[2]

    def get(self) -> Any:
        return type(self).size


class WritesList(Writer):
    def leave(self, y: torch.Tensor) -> None:
        SIZES[:] = [y.shape[2]]

    def get(self) -> Any:
        return SIZES[-1]


class WritesThread(Writer):
    def leave(self, y: torch.Tensor) -> None:
        LOCAL.height = y.shape[2]

    def get(self) -> Any:
        return LOCAL.height


class WritesContext(Writer):
    def leave(self, y: torch.Tensor) -> None:
        GRID.set(y.shape[2])

    def get(self) -> Any:
        return GRID.get()


class WritesByModule(Writer):
    def leave(self, y: torch.Tensor) -> None:
        BY_MODULE[self] = y.shape[2]

    def get(self) -> Any:
        return BY_MODULE[self]


OUTSIDE = [WritesGlobal, WritesClass, WritesList, WritesThread, WritesContext, WritesByModule]


class Parent(nn.Module):
    """Reads what its child has left."""

    def __init__(self, kind: type[Writer]) -> None:
        super().__init__()
        self.context: dict[str, Any] = {}
        self.child, self.head = kind(self.context), nn.Conv2d(4, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.child(x)) * self.child.get()


class Reader(nn.Module):
    def __init__(self, writer: Writer) -> None:
        super().__init__()
        self.context, self.layer = writer.context, nn.Conv2d(4, 4, 1)
        object.__setattr__(self, "get", writer.get)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.get()


class Siblings(nn.Module):
    """A module reads what the one before it has left."""

    def __init__(self, kind: type[Writer]) -> None:
        super().__init__()
        self.child, self.head = kind({}), nn.Conv2d(4, 2, 1)
        self.reader = Reader(self.child)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.reader(self.child(x)))


@pytest.fixture(autouse=True)
def nothing_left() -> None:
    INFO.clear()
    SIZES.clear()
    BY_MODULE.clear()
    WritesClass.size = 0
    vars(LOCAL).clear()


def check(kind: type[nn.Module], writer: type[Writer], names: list[str], *, has_run: bool) -> None:
    model, example = kind(writer).eval(), torch.rand(2, 3, 8, 8)
    if has_run:
        model(example)
    try:
        extractor = featx.create_feature_extractor(model, names, example_inputs=example)
    except featx.TraceError:
        return
    for x in (example, torch.rand(1, 3, 8, 8), torch.rand(2, 3, 12, 12), -5 * torch.rand(2, 3, 8, 8), example):
        try:
            got = extractor(x)[names[-1]]
        except featx.SpecializationError:
            assert x is not example
            continue
        assert torch.equal(got, model(x))


HAS_RUN = [False, pytest.param(True, marks=pytest.mark.slow)]


@pytest.mark.slow
@pytest.mark.parametrize("has_run", HAS_RUN, ids=["new", "has run"])
@pytest.mark.parametrize(
    "names",
    [
        ["child.conv", "output"],
        *(pytest.param(each, marks=pytest.mark.slow) for each in (["head", "output"], ["output"])),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("writer", SHARED)
def test_what_a_parent_reads_of_a_shared_object_is_that_of_this_input(
    writer: type[Writer], names: list[str], has_run: bool
) -> None:
    check(Parent, writer, names, has_run=has_run)


@pytest.mark.slow
@pytest.mark.parametrize("has_run", HAS_RUN, ids=["new", "has run"])
@pytest.mark.parametrize(
    "names", [["output"], ["child.conv", "output"], ["reader.layer", "output"], ["child", "reader", "output"]],
    ids=" ".join,
)  # fmt: skip
@pytest.mark.parametrize("writer", SHARED)
def test_what_a_sibling_reads_of_a_shared_object_is_that_of_this_input(
    writer: type[Writer], names: list[str], has_run: bool
) -> None:
    check(Siblings, writer, names, has_run=has_run)


@pytest.mark.slow
@pytest.mark.parametrize("names", [["head", "output"], ["child.conv", "output"]], ids=" ".join)
@pytest.mark.parametrize("kind", [Parent, Siblings])
@pytest.mark.parametrize("writer", OUTSIDE)
def test_what_is_read_of_a_global_is_that_of_this_input(
    writer: type[Writer], kind: type[nn.Module], names: list[str]
) -> None:
    check(kind, writer, names, has_run=False)


@pytest.mark.slow
@pytest.mark.parametrize("writer", OUTSIDE)
def test_what_was_left_in_a_global_before_is_not_read(writer: type[Writer]) -> None:
    """The child is traced and the reader is kept whole: a graph leaves nothing there for it."""
    check(Siblings, writer, ["child.conv", "output"], has_run=True)


def test_number_that_no_other_code_reads_keeps_a_module_whole() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.child, self.head = WritesGlobal({}), nn.Conv2d(4, 2, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.child(x))

    extractor = featx.create_feature_extractor(Model().eval(), ["head"], example_inputs=torch.rand(2, 3, 8, 8))
    assert extractor.graph.find_nodes(op="call_module", target="child")
    extractor(torch.rand(1, 3, 12, 12))
    assert INFO == {"h": 6}
