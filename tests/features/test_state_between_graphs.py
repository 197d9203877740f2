"""Values that forward keeps in attributes of modules for calls that another graph of the extractor computes."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import featx


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)
        self.kept: Any = torch.zeros(4)


class Centre(Base):
    """Subtracts a mean that training keeps in an attribute."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.proj(x)
        if self.training:
            self.kept = h.mean(0).detach()
        return h - self.kept


class CentreInList(Base):
    def __init__(self) -> None:
        super().__init__()
        self.kept = [torch.zeros(4)]

    def forward(self, x: Tensor) -> Tensor:
        h = self.proj(x)
        if self.training:
            self.kept[0] = h.mean(0).detach()
        return h - self.kept[0]


class Length(Base):
    """Divides by a number of rows that training keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = 1

    def forward(self, x: Tensor) -> Tensor:
        h = self.proj(x)
        if self.training:
            self.kept = x.shape[0]
        return h / self.kept


class CentreByEval(Base):
    """Keeps it in eval mode, for training."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.proj(x)
        if not self.training:
            self.kept = h.mean(0).detach()
        return h - self.kept


class AsksWhetherItIsThere(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.proj(x)
        if self.training:
            self.last = h.detach()
            return h
        return h + self.last if hasattr(self, "last") else h


class Child(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)
        self.kept = torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.proj(x)
        if self.training:
            self.kept = h.mean(0).detach()
        return h


class OfChild(nn.Module):
    """Reads what a child keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.child = Child()

    def forward(self, x: Tensor) -> Tensor:
        return self.child(x) - self.child.kept


KEPT = {"centre": torch.zeros(4)}


class OfFile(Base):
    """Keeps it in a dict of the file."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.proj(x)
        if self.training:
            KEPT["centre"] = h.mean(0).detach()
        return h - KEPT["centre"]


class Watched(Base):
    """Keeps what somebody else looks at."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.proj(x)
        if not self.training:
            self.kept = h.detach()
        return h * 2

    def picture(self) -> Tensor:
        return self.kept.mean()


class Nested(nn.Module):
    def __init__(self, inner: type[Base]) -> None:
        super().__init__()
        self.inner = inner()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + 1


X = torch.randn(3, 4) * 2
# Not in a function: a tracer takes a function beside a class that has such a text for one that may ask for it.
USUAL_NAME = "kept"


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", [Centre, CentreInList, Length, CentreByEval, AsksWhetherItIsThere, Watched])
@pytest.mark.parametrize("nest", [False, True])
def test_each_value_is_that_of_the_model_or_refused(kind: type[Base], training: bool, nest: bool) -> None:
    model: nn.Module = Nested(kind) if nest else kind()
    model.train(training)
    eager = copy.deepcopy(model)
    # What is kept whole keeps its state itself: a request inside opens it.
    request = ["inner.proj", "output"] if nest else ["output"]
    extractor = featx.create_feature_extractor(model, request, example_inputs=X, suppress_diff_warning=True)
    refused: dict[bool, str] = {}
    for mode in (True, False, True, False):
        try:
            found = extractor.train(mode)(X)["output"]
        except featx.TraceError as error:
            refused[mode] = str(error)
        else:
            torch.testing.assert_close(found, eager.train(mode)(X), rtol=0, atol=0)
    if kind is Watched:
        assert not refused
    elif kind is AsksWhetherItIsThere:
        assert refused.keys() == {True}
    else:
        assert refused.keys() == {not training}
        assert f"in the attribute '{'inner.' if nest else ''}{USUAL_NAME}' in " in refused[not training]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("kind", "names", "text"),
    [
        (OfChild, ["child.proj", "output"], "the attribute 'child.kept'"),
        (OfFile, ["output"], "'centre' in the model's Python file"),
    ],
)
def test_state_of_a_child_and_of_a_file(kind: type[nn.Module], names: list[str], text: str, training: bool) -> None:
    model = kind().train(training)
    extractor = featx.create_feature_extractor(model, names, example_inputs=X, suppress_diff_warning=True)
    torch.testing.assert_close(extractor(X)["output"], copy.deepcopy(model)(X), rtol=0, atol=0)
    with pytest.raises(featx.TraceError, match=f"stores what it computes in {re.escape(text)} in train"):
        extractor.train(not training)(X)
    KEPT["centre"] = torch.zeros(4)


def test_a_module_that_is_kept_whole_keeps_its_state() -> None:
    model = Nested(Centre)
    eager = copy.deepcopy(model)
    extractor = featx.create_feature_extractor(model, ["output"], example_inputs=X)
    for mode in (True, False, True, False):
        torch.testing.assert_close(extractor.train(mode)(X)["output"], eager.train(mode)(X), rtol=0, atol=0)


class KeyFrame(Base):
    """Adds the features of the last frame with large values."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = None

    def forward(self, x: Tensor) -> Tensor:
        h = self.proj(x)
        if x.abs().max() > 1:
            self.kept = h.detach()
        return h if self.kept is None else h + self.kept


@pytest.mark.slow
@pytest.mark.parametrize("adaptive", [None, True])
@pytest.mark.parametrize("order", [(X, X / 100, X), (X / 100, X, X / 100)])
def test_cases_with_state_between_them_are_refused(adaptive: bool | None, order: tuple[Tensor, ...]) -> None:
    model = KeyFrame().eval()
    extractor = featx.create_feature_extractor(model, ["output"], example_inputs=order[0], adaptive=adaptive)
    torch.testing.assert_close(extractor(order[0])["output"], copy.deepcopy(model)(order[0]), rtol=0, atol=0)
    for x in order[1:2] * 2:
        with pytest.raises(
            featx.SpecializationError, match=f"stores what it computes in the attribute '{USUAL_NAME}' for some"
        ):
            extractor(x)


class Mask(Base):
    """Keeps a table by size, which each call of a case makes itself, and a branch by value."""

    def forward(self, x: Tensor) -> Tensor:
        self.kept = torch.arange(x.shape[0]).to(x)[:, None] + x.mean()
        h = self.proj(x) + self.kept
        return h * 2 if x.max() > 1 else h


@pytest.mark.parametrize("adaptive", [None, True])
def test_cases_that_assign_before_they_read_are_taken(adaptive: bool | None) -> None:
    model = Mask().eval()
    extractor = featx.create_feature_extractor(model, ["output"], example_inputs=X, adaptive=adaptive)
    for x in (X, X / 100, X[:2] / 100, X):
        torch.testing.assert_close(extractor(x)["output"], model(x), rtol=0, atol=0)


class Splits(Base):
    """Uses one of two parts, and a size after them."""

    def forward(self, x: Tensor) -> Tensor:
        parts, form = self.proj(x).chunk(2, 1), x.shape
        return parts[1] * 2 + form[0]


class KeepsParts(Base):
    """Does the same, and keeps what nobody uses."""

    def forward(self, x: Tensor) -> Tensor:
        parts, form = self.proj(x).chunk(2, 1), x.shape
        self.parts, self.form = parts, form
        return parts[1] * 2 + form[0]

    def report(self) -> Any:
        return self.parts, self.form


def test_attributes_that_are_kept_change_no_names() -> None:
    example = torch.rand(3, 4)
    names = [featx.get_graph_node_names(kind(), example_inputs=example) for kind in (Splits, KeepsParts)]
    assert names[0] == names[1]


class Observes(nn.Module):
    """Writes a buffer in train mode that it reads in eval mode alone."""

    amax: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)
        self.register_buffer("amax", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if self.training:
            self.amax.copy_(torch.maximum(self.amax, y.abs().max().detach()[None]))
        else:
            y = y / self.amax
        return self.last(y)


def test_a_buffer_that_one_mode_writes_and_the_other_reads_is_written() -> None:
    model = Observes()
    twin = copy.deepcopy(model)
    x = torch.rand(6, 4) * 5
    nodes = {"train_return_nodes": ["first", "output"], "eval_return_nodes": ["output"]}
    extractor = featx.create_feature_extractor(model, example_inputs=x, suppress_diff_warning=True, **nodes)
    for scale in (1.0, 3.0):
        extractor.train()(x * scale)
        twin.train()(x * scale)
        assert torch.equal(model.amax, twin.amax)
        assert torch.equal(extractor.eval()(x)["output"], twin.eval()(x))


class Accumulates(nn.Module):
    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x: Tensor, use: bool = False) -> Tensor:
        y = self.first(x)
        self.total += y.detach().mean(0)
        return y + self.total if use else y + 1


def test_a_buffer_that_one_case_does_not_write_and_another_reads_is_refused() -> None:
    x = torch.rand(6, 4)
    model = Accumulates().eval()
    extractor = featx.create_feature_extractor(model, ["output"], example_inputs=(x,), adaptive=True)
    assert torch.equal(extractor(x)["output"], model(x))
    with pytest.raises(featx.SpecializationError, match="the tensor would be out of date"):
        extractor(x, True)
