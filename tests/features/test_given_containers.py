"""Modules that are kept whole change a list, dict or object that they are given; against the eager model."""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib.util
import pickle
import types
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import featx


@dataclasses.dataclass
class State:
    a: torch.Tensor
    b: torch.Tensor | None = None

    def __getitem__(self, key: str) -> Any:
        return getattr(self, key)

    def __setitem__(self, key: str, value: Any) -> None:
        setattr(self, key, value)


CONDITIONS: dict[str, Callable[[torch.Tensor], bool]] = {
    "by size": lambda x: x.shape[-1] > 6,
    "by value": lambda x: bool(x.mean() > 0),
}
KINDS: dict[str, Callable[[torch.Tensor], Any]] = {
    "a dict": lambda x: {"a": x},
    "an OrderedDict": lambda x: OrderedDict(a=x),
    "a dataclass": lambda x: State(x),
    "a dict in a list": lambda x: {"a": x},
}


class Fills(nn.Module):
    def __init__(self, is_large: Callable[[torch.Tensor], bool], how: str) -> None:
        super().__init__()
        self.conv, self.is_large, self.how = nn.Conv1d(4, 4, 1), is_large, how

    def forward(self, state: Any) -> None:
        part = state[0] if isinstance(state, list) else state
        if self.how == "a method":
            self._fill(part)
            return
        if self.how == "a function":
            fill(part, self)
            return
        if self.how == "early return" and not self.is_large(part["a"]):
            return
        if self.how == "early return" or self.is_large(part["a"]):
            part["a"] = self.conv(part["a"])

    def _fill(self, part: Any) -> None:
        if self.is_large(part["a"]):
            part["a"] = self.conv(part["a"])


def fill(part: Any, module: Fills) -> None:
    if module.is_large(part["a"]):
        part["a"] = module.conv(part["a"])


class ReadsGiven(nn.Module):
    def __init__(self, kind: str, condition: str, how: str) -> None:
        super().__init__()
        self.first, self.last = nn.Conv1d(4, 4, 1), nn.Conv1d(4, 4, 1)
        self.fill, self.kind = Fills(CONDITIONS[condition], how), kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = KINDS[self.kind](self.first(x))
        self.fill([state] if self.kind == "a dict in a list" else state)
        return self.last(state["a"])


@pytest.mark.slow
@pytest.mark.parametrize("names", [["output"], ["first", "last"]], ids=" ".join)
@pytest.mark.parametrize(
    "how",
    ["a branch", *(pytest.param(each, marks=pytest.mark.slow) for each in ("early return", "a method", "a function"))],
)
@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_module_changes_for_some_inputs_only(kind: str, condition: str, how: str, names: list[str]) -> None:
    torch.manual_seed(0)
    model = ReadsGiven(kind, condition, how).eval()
    inputs = [torch.randn(2, 4, 6) - 3, torch.randn(2, 4, 9) + 3]
    with torch.no_grad():
        model.first.bias.zero_()
        model.first.weight.copy_(torch.eye(4).unsqueeze(-1))
    for example, other in (inputs, reversed(inputs)):
        extractor = featx.create_feature_extractor(model, names, example_inputs=example)
        for x in (example, other):
            try:
                found = extractor(x)
            except featx.SpecializationError:
                assert x is other
                continue
            assert torch.equal(found[names[-1]], model(x))


class Returns(nn.Module):
    """Fills what it is given and returns it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 4, 1)

    def forward(self, state: Any) -> Any:
        state["b"] = self.conv(state["a"])
        return state


class WritesReturned(nn.Module):
    """Changes what such a module has returned, and reads what it was given, or the other way round."""

    def __init__(self, kind: str, changes_given: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Conv1d(4, 4, 1), nn.Conv1d(4, 4, 1)
        self.fill, self.kind, self.changes_given = Returns(), kind, changes_given

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = KINDS[self.kind](self.first(x))
        returned = self.fill(given)
        changed, read = (given, returned) if self.changes_given else (returned, given)
        changed["a"] = changed["a"] * 2
        return self.last(read["a"] + read["b"])


@pytest.mark.parametrize("changes_given", [True, False])
@pytest.mark.parametrize("names", [["output"], ["first", "last"], ["fill.conv", "output"]], ids=" ".join)
@pytest.mark.parametrize("kind", ["a dict", "an OrderedDict", "a dataclass"])
def test_what_a_module_returns_is_what_it_was_given(kind: str, names: list[str], changes_given: bool) -> None:
    torch.manual_seed(0)
    model, x = WritesReturned(kind, changes_given).eval(), torch.randn(3, 4, 5)
    found = featx.create_feature_extractor(model, names, example_inputs=torch.randn(2, 4, 6))(x)
    assert torch.equal(found[names[-1]], model(x))


class TakesOut(nn.Module):
    """Takes something out of what it is given, and changes that for some sizes only, or returns it too."""

    def __init__(self, kind: str, returns_given: bool) -> None:
        super().__init__()
        self.linear, self.kind, self.returns_given = nn.Linear(4, 4), kind, returns_given

    def forward(self, state: Any) -> Any:
        if self.kind == "a list":
            mask, y = (state.pop() if len(state) > 1 else None), self.linear(state[0])
        elif self.kind == "a dataclass":
            mask, state.b = state.b, None
            y = self.linear(state.a)
        else:
            mask, y = state.pop("b", None), self.linear(state["a"])
        if mask is not None:
            y = y * mask
        if self.returns_given:
            return y, state
        if y.shape[0] > 3:
            state.append(y) if self.kind == "a list" else state.__setitem__("a", y)
        return y


class GivesMask(nn.Module):
    def __init__(self, kind: str, returns_given: bool) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(4, 4), TakesOut(kind, returns_given)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, mask = self.first(x), (x > 0.5).float()
        kinds = {"a list": [y, mask], "a dict": {"a": y, "b": mask}, "a dataclass": State(y, mask)}
        found = self.inner(kinds[self.inner.kind])
        return found[0] if self.inner.returns_given else found


@pytest.mark.parametrize("returns_given", [True, False])
@pytest.mark.parametrize("kind", ["a list", "a dict", "a dataclass"])
def test_what_a_refused_call_has_taken_out_is_there_for_the_next_one(kind: str, returns_given: bool) -> None:
    torch.manual_seed(0)
    model = GivesMask(kind, returns_given).eval()
    example = torch.rand(2, 4)
    extractor = featx.create_feature_extractor(model, ["first", "output"], example_inputs=example)
    for x in (example, torch.rand(2, 4)):
        found = extractor(x)
        assert torch.equal(found["first"], model.first(x))
        assert torch.equal(found["output"], model(x))


class AddsToList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 4, 1)

    def forward(self, state: Any, more: Any = None) -> None:
        if state[0].shape[-1] > 6:
            state += [self.conv(state[0])]


class AddsByBase(AddsToList):
    def forward(self, state: Any, more: Any = None) -> None:
        super().forward(state)


class AddsByMethodOfBase(AddsToList):
    def forward(self, state: Any, more: Any = None) -> None:
        super().forward(more=None, state=state)


class AddsToFurther(AddsToList):
    def forward(self, *given: Any) -> None:  # type: ignore[override]
        if given[0][0].shape[-1] > 6:
            given[1].append(self.conv(given[0][0]))


class AddsToNamed(AddsToList):
    def forward(self, state: Any, **more: Any) -> None:  # type: ignore[override]
        for each in more.values():
            if state[0].shape[-1] > 6:
                each.append(self.conv(state[0]))


class HandsOnFurther(AddsToList):
    def forward(self, *given: Any) -> None:  # type: ignore[override]
        self.add(*given)

    def add(self, state: Any, more: Any) -> None:
        if state[0].shape[-1] > 6:
            more.append(self.conv(state[0]))


_WITHOUT_SOURCE: dict[str, Any] = {"AddsToList": AddsToList, "Any": Any}
exec(
    "class AddsWithoutSource(AddsToList):\n"
    "    def forward(self, state, more=None):\n"
    "        if state[0].shape[-1] > 6:\n"
    "            state.append(self.conv(state[0]))\n",
    _WITHOUT_SOURCE,
)
ADDING: dict[str, Any] = {
    "+=": (AddsToList, lambda module, items: module(items)),
    "super().forward": (AddsByBase, lambda module, items: module(items)),
    "super().forward by name": (AddsByMethodOfBase, lambda module, items: module(items)),
    "further arguments": (AddsToFurther, lambda module, items: module(items, items)),
    "further named": (AddsToNamed, lambda module, items: module(items, more=items)),
    "further handed on": (HandsOnFurther, lambda module, items: module(items, items)),
    "no source": (_WITHOUT_SOURCE["AddsWithoutSource"], lambda module, items: module(items)),
}


class ReadsLast(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.last = nn.Conv1d(4, 4, 1), nn.Conv1d(4, 4, 1)
        made, self.call = ADDING[kind]
        self.inner = made()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        items = [self.first(x)]
        self.call(self.inner, items)
        return self.last(items[-1])


@pytest.mark.parametrize("names", [["output"], ["first", "last"]], ids=" ".join)
@pytest.mark.parametrize("kind", ADDING)
def test_other_spellings_of_such_a_change(kind: str, names: list[str]) -> None:
    torch.manual_seed(0)
    model = ReadsLast(kind).eval()
    short, long = torch.randn(2, 4, 6), torch.randn(2, 4, 9)
    for example, other in ((short, long), (long, short)):
        extractor = featx.create_feature_extractor(model, names, example_inputs=example)
        assert torch.equal(extractor(example)[names[-1]], model(example))
        with pytest.raises(featx.SpecializationError):
            extractor(other)


class Ranks(nn.Module):
    """Sorts the list that it is given by what is in it."""

    def forward(self, items: Any) -> torch.Tensor:
        items.sort(key=lambda item: float(item.sum()))
        return items[0]


class TakesOneOut(nn.Module):
    def forward(self, items: Any) -> torch.Tensor:
        return items.pop(int(items[0].sum() > items[1].sum()))


class KeepsPositive(nn.Module):
    def forward(self, items: Any) -> torch.Tensor:
        items.extend([item for item in items if item.sum() > 0])
        return items[0]


def triple_first(module: nn.Module, items: Any) -> torch.Tensor:
    if items[0].sum() > 0:
        items[0] = items[0] * 3
    return items[1]


class ByAnotherName(nn.Module):
    """Its forward is a function of another file's style, whose first parameter is not called self."""

    forward = triple_first


class OnInstance(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.forward = types.MethodType(triple_first, self)


class InnerModules(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([ByAnotherName()])

    def forward(self, items: Any) -> torch.Tensor:
        for layer in self.layers:
            layer(items)
        return items[1]


def passing_on(function: Any) -> Any:
    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapped


class Decorated(nn.Module):
    @passing_on
    def forward(self, items: Any) -> torch.Tensor:
        return triple_first(self, items)


class ByAttribute(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.change = functools.partial(triple_first, self)

    def forward(self, items: Any) -> torch.Tensor:
        return self.change(items)


class ByBoundMethod(nn.Module):
    def forward(self, items: Any) -> torch.Tensor:
        add = items.append
        if items[0].sum() > 0:
            add(items[0] * 2)
        return items[1]


class ByStoredList(nn.Module):
    def forward(self, items: Any) -> torch.Tensor:
        holder = {"items": items}
        if items[0].sum() > 0:
            holder["items"].append(items[0] * 2)
        return items[1]


class FillsEmpty(nn.Module):
    """Adds to an empty list, for some inputs."""

    def forward(self, x: torch.Tensor, found: Any) -> torch.Tensor:
        if x.sum() > 0:
            found.append(x * 3)
        return x


class GivesEmpty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.fills, self.head = nn.Linear(4, 4, bias=False), FillsEmpty(), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, found = self.a(x), list[torch.Tensor]()
        y = self.fills(y, found)
        return self.head(torch.stack([y, *found]).sum(0))


def test_an_empty_list_that_is_filled_for_other_inputs() -> None:
    torch.manual_seed(0)
    model, x = GivesEmpty().eval(), torch.rand(2, 4)
    for example in (x, -x):
        extractor = featx.create_feature_extractor(model, ["a", "head"], example_inputs=example)
        assert torch.equal(extractor(example)["head"], model(example))
        try:
            found = extractor(-example)["head"]
        except featx.SpecializationError:
            continue
        assert torch.equal(found, model(-example))


class GivesTwo(nn.Module):
    def __init__(self, change: nn.Module, kind: str) -> None:
        super().__init__()
        self.a, self.b, self.head = (nn.Linear(4, 4, bias=False) for _ in range(3))
        self.change, self.kind = change, kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        items = [self.a(x), self.b(x)]
        if self.kind == "used":
            x = self.change(items)
        else:
            self.change(items)
        return self.head(items[0] * 2 + items[-1] * 3 + x)


CHANGES = [
    Ranks, TakesOneOut, KeepsPositive, ByAnotherName, OnInstance, InnerModules, Decorated, ByAttribute, ByBoundMethod,
    ByStoredList,
]  # fmt: skip


@pytest.mark.parametrize("names", [["head"], ["a", "b", "head"]], ids=" ".join)
@pytest.mark.parametrize("kind", ["used", "result is dropped"])
@pytest.mark.parametrize("change", CHANGES)
def test_no_change_for_other_inputs_goes_unnoticed(change: type[nn.Module], kind: str, names: list[str]) -> None:
    torch.manual_seed(0)
    model = GivesTwo(change(), kind).eval()
    inputs = [torch.randn(2, 4) for _ in range(3)]
    inputs += [-x for x in inputs]
    for example in (inputs[0], inputs[3]):
        try:
            extractor = featx.create_feature_extractor(model, names, example_inputs=example)
        except featx.TraceError:
            continue
        assert torch.equal(extractor(example)["head"], model(example))
        for x in inputs:
            try:
                found = extractor(x)["head"]
            except featx.SpecializationError:
                continue
            assert torch.equal(found, model(x))


class Fuses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, maps: list[torch.Tensor]) -> torch.Tensor:
        return self.first(maps[0]) + self.second(maps[1])


class Mixes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, maps: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.linear(maps["a"]) + maps["b"]


class GivesListAndDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.fuses, self.mixes = nn.Linear(4, 4), nn.Linear(4, 4), Fuses(), Mixes()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.a(x), self.b(x)
        y = self.fuses([a, b])
        return self.mixes({"a": a, "b": y}) * 2


@pytest.mark.slow
def test_what_calls_leave_is_checked_by_each_kind_of_code(tmp_path: Path) -> None:
    x = torch.rand(2, 4)
    extractor = featx.create_feature_extractor(GivesListAndDict().eval(), ["fuses", "output"], example_inputs=x)
    assert extractor.code.count("check_held(") == 2
    expected = extractor(x)
    extractor.to_folder(tmp_path / "written")
    makers: list[Callable[[], Any]] = [
        lambda: copy.deepcopy(extractor),
        lambda: pickle.loads(pickle.dumps(extractor)),
        lambda: torch.compile(extractor, backend="aot_eager", fullgraph=True),
        lambda: torch.export.export(extractor, (x,)).module(),
        lambda: torch.jit.script(extractor),
        lambda: featx.to_torch_fx(extractor),
        lambda: written_in(tmp_path / "written"),
    ]
    for make in makers:
        found = make()(x)
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def written_in(folder: Path) -> Any:
    spec = importlib.util.spec_from_file_location("written", folder / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.FxModule()
