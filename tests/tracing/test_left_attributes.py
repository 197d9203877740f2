"""What a module notes of its input in an attribute or a global, and code around it reads after the call."""

from __future__ import annotations

import copy
import types
from typing import Any

import pytest
import torch
from torch import nn

import featx

X = torch.rand(3, 4, generator=torch.Generator().manual_seed(0))
INPUTS = [X, -X, torch.rand(5, 4), torch.rand(1, 4)]
GLOBAL = types.SimpleNamespace(count=None)
BY_NAME: dict[str, Any] = {}


class Context:
    def __init__(self) -> None:
        self.count: Any = 1


class Noting(nn.Module):
    """Notes something of its input."""

    of_class: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.count: Any = 3  # that of the example
        self.listed: list[Any] = []
        self.named: dict[str, Any] = {}
        self.context = Context()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.note(x)
        return self.linear(x)

    def note(self, x: torch.Tensor) -> None:
        self.count = x.shape[0]

    @property
    def rows(self) -> Any:
        return self.count

    def found(self) -> Any:
        return self.count


class Reading(nn.Module):
    """Reads what its part has noted."""

    part_class = Noting

    def __init__(self) -> None:
        super().__init__()
        self.first, self.part, self.last = nn.Linear(4, 4), self.part_class(), nn.Linear(4, 4)
        self.context = self.part.context

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.part(self.first(x))
        return self.last(y * self.read())

    def read(self) -> Any:
        return self.part.count


class ReadsProperty(Reading):
    def read(self) -> Any:
        return self.part.rows


class ReadsMethod(Reading):
    def read(self) -> Any:
        return self.part.found()


class ReadsGetAttribute(Reading):
    def read(self) -> Any:
        return getattr(self.part, "count", 1)


class NotesTuple(Noting):
    def note(self, x: torch.Tensor) -> None:
        self.count = (x.shape[0],)


class ReadsTuple(Reading):
    part_class = NotesTuple

    def read(self) -> Any:
        return self.part.count[0]


class NotesText(Noting):
    def note(self, x: torch.Tensor) -> None:
        self.count = "many" if x.shape[0] > 3 else "few"


class ReadsText(Reading):
    part_class = NotesText

    def read(self) -> Any:
        return 2 if self.part.count == "many" else 1


class NotesNothing(Noting):
    def note(self, x: torch.Tensor) -> None:
        self.count = None if x.shape[0] > 3 else 3


class ReadsNothing(Reading):
    part_class = NotesNothing

    def read(self) -> Any:
        return 2 if self.part.count is None else 1


class NotesValue(Noting):
    def note(self, x: torch.Tensor) -> None:
        self.count = x.sum().item()


class ReadsValue(Reading):
    part_class = NotesValue

    def read(self) -> Any:
        return self.part.count


class NotesTensor(Noting):
    def note(self, x: torch.Tensor) -> None:
        self.count = x * 2


class ReadsTensor(Reading):
    part_class = NotesTensor

    def read(self) -> Any:
        return self.part.count


class NotesInAList(Noting):
    def note(self, x: torch.Tensor) -> None:
        self.listed = [x * 2]


class ReadsInAList(Reading):
    part_class = NotesInAList

    def read(self) -> Any:
        return self.part.listed[0]


class NotesInTheList(Noting):
    def note(self, x: torch.Tensor) -> None:
        self.listed.clear()
        self.listed.append(x.shape[0])


class ReadsInTheList(Reading):
    part_class = NotesInTheList

    def read(self) -> Any:
        return self.part.listed[0]


class NotesByName(Noting):
    def note(self, x: torch.Tensor) -> None:
        self.named["rows"] = x.shape[0]


class ReadsByName(Reading):
    part_class = NotesByName

    def read(self) -> Any:
        return self.part.named["rows"]


class NotesInAnObject(Noting):
    def note(self, x: torch.Tensor) -> None:
        self.context.count = x.shape[0]


class ReadsInAnObject(Reading):
    part_class = NotesInAnObject

    def read(self) -> Any:
        return self.part.context.count


class NotesInTheClass(Noting):
    def note(self, x: torch.Tensor) -> None:
        Noting.of_class = x.shape[0]


class ReadsInTheClass(Reading):
    part_class = NotesInTheClass

    def read(self) -> Any:
        return Noting.of_class


class NotesInAGlobal(Noting):
    def note(self, x: torch.Tensor) -> None:
        GLOBAL.count = x.shape[0]


class ReadsInAGlobal(Reading):
    part_class = NotesInAGlobal

    def read(self) -> Any:
        return GLOBAL.count


class NotesInAGlobalDict(Noting):
    def note(self, x: torch.Tensor) -> None:
        BY_NAME["rows"] = x.shape[0]


class ReadsInAGlobalDict(Reading):
    part_class = NotesInAGlobalDict

    def read(self) -> Any:
        return BY_NAME["rows"]


KINDS = [
    Reading,
    ReadsProperty,
    ReadsMethod,
    ReadsGetAttribute,
    ReadsTuple,
    ReadsText,
    ReadsNothing,
    ReadsValue,
    ReadsTensor,
    ReadsInAList,
    ReadsInTheList,
    ReadsByName,
    ReadsInAnObject,
    ReadsInTheClass,
    ReadsInAGlobal,
    ReadsInAGlobalDict,
]
OUTSIDE = [ReadsInTheClass, ReadsInAGlobal, ReadsInAGlobalDict]


def check(kind: type[Reading], names: list[str], *, has_run: bool) -> None:
    GLOBAL.count = BY_NAME["rows"] = Noting.of_class = None
    model = kind().eval()
    twin = copy.deepcopy(model)
    if has_run:  # a call with the example leaves what is there
        with torch.no_grad():
            model(X)
    try:
        extractor = featx.create_feature_extractor(model, names, example_inputs=X)
    except featx.TraceError:
        return
    for x in INPUTS:
        try:
            found = extractor(x)[names[-1]]
        except featx.FeatxError:
            continue
        assert torch.equal(found, twin(x))


@pytest.mark.parametrize("names", [["last"], ["part", "output"], ["part.linear", "last"]], ids=" ".join)
@pytest.mark.parametrize("kind", KINDS)
def test_feature_is_right_for_each_input_or_refused(kind: type[Reading], names: list[str]) -> None:
    check(kind, names, has_run=False)


@pytest.mark.parametrize("names", [["last"], ["part", "output"], ["part.linear", "last"]], ids=" ".join)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in OUTSIDE])
def test_it_is_so_where_the_model_has_noted_the_same_before(kind: type[Reading], names: list[str]) -> None:
    check(kind, names, has_run=True)


@pytest.mark.parametrize("kind", [Reading, ReadsProperty, ReadsTuple, ReadsInAList, ReadsByName, ReadsTensor])
def test_module_whose_notes_are_read_is_looked_into(kind: type[Reading]) -> None:
    model = kind().eval()
    extractor = featx.create_feature_extractor(model, ["last"], example_inputs=X)
    twin = copy.deepcopy(model)
    for x in INPUTS:
        assert torch.equal(extractor(x)["last"], twin(x))


def test_module_whose_notes_are_not_read_stays_whole() -> None:
    model = nn.Sequential(Noting(), nn.Linear(4, 2))
    extractor = featx.create_feature_extractor(model, ["1"], example_inputs=X)
    assert [node.target for node in extractor.graph.nodes if node.op == "call_module"] == ["0", "1"]
    assert torch.equal(extractor(X)["1"], model(X))
