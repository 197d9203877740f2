"""Objects whose constructors compute something: what the model returns is rebuilt without another call of them."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import featx

X = torch.rand(2, 4, generator=torch.Generator().manual_seed(0))


@dataclasses.dataclass
class Scaled:
    logits: torch.Tensor
    temperature: float = 2.0

    def __post_init__(self) -> None:
        self.logits = self.logits / self.temperature


@dataclasses.dataclass(frozen=True)
class Frozen:
    logits: torch.Tensor

    def __post_init__(self) -> None:
        object.__setattr__(self, "logits", self.logits + 1)


@dataclasses.dataclass
class Initialized:
    logits: torch.Tensor
    factor: dataclasses.InitVar[int] = 3

    def __post_init__(self, factor: int) -> None:
        self.logits = self.logits * factor


@dataclasses.dataclass
class Derived:
    logits: torch.Tensor
    doubled: torch.Tensor = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.doubled = self.logits * 2


@dataclasses.dataclass(slots=True)
class Slotted:
    logits: torch.Tensor

    def __post_init__(self) -> None:
        self.logits = self.logits - 1


@dataclasses.dataclass(init=False)
class OwnConstructor:
    logits: torch.Tensor

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits * 5


@dataclasses.dataclass
class Plain:
    logits: torch.Tensor
    extra: Any = None


class Halves(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


class Doubling(Halves):
    def __new__(cls, first: torch.Tensor, second: torch.Tensor) -> Doubling:
        return super().__new__(cls, first * 2, second)


class Shifted(tuple[torch.Tensor, ...]):
    def __new__(cls, items: Iterable[torch.Tensor]) -> Shifted:
        return super().__new__(cls, [item + 1 for item in items])


class Named(dict[str, torch.Tensor]):
    def __init__(self, **items: torch.Tensor) -> None:
        super().__init__({name: item + 1 for name, item in items.items()})


class Ordered(collections.OrderedDict[str, torch.Tensor]):
    def __init__(self, **items: torch.Tensor) -> None:
        super().__init__((name, item * 3) for name, item in items.items())


class Listed(list[torch.Tensor]):
    def __init__(self, items: Iterable[torch.Tensor]) -> None:
        super().__init__(item + 1 for item in items)


class Counted(tuple[torch.Tensor, ...]):
    rows = 1


class Keyed(dict[str, Any]):
    rows = 1

    def __init__(self, **items: Any) -> None:
        super().__init__(items)
        self.rows = 5


class KeyedInSlots(dict[str, Any]):
    __slots__ = ("mean", "rows")


class Marked(dict[str, Any]):
    rows = 1


class ItemsAsAttributes(dict[str, Any]):
    def __init__(self, **items: Any) -> None:
        super().__init__(items)
        self.__dict__ = self


class ListInSlots(list[torch.Tensor]):
    __slots__ = ("rows",)

    rows: int


def with_attributes(value: Any, **attributes: Any) -> Any:
    for name, item in attributes.items():
        setattr(value, name, item)
    return value


WITH_ATTRIBUTES: dict[str, Callable[[torch.Tensor], Any]] = {
    "tuple": lambda x: with_attributes(Counted([x, x + 1]), rows=7, mean=x.mean()),
    "dict": lambda x: Keyed(logits=x),
    "changed in a dict": lambda x: with_attributes(Keyed(logits=x), rows=9, mean=x.mean()),
    "slots of a dict": lambda x: with_attributes(KeyedInSlots(logits=x), rows=9, mean=x.mean()),
    "dict without constructor": lambda x: with_attributes(Marked(logits=x), rows=9, mean=x.mean()),
    "items as attributes": lambda x: ItemsAsAttributes(logits=x, rows=9, mean=x.mean()),
}

MAKERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "post init": Scaled,
    "frozen": Frozen,
    "init variable": Initialized,
    "derived field": Derived,
    "slots": Slotted,
    "own constructor": OwnConstructor,
    "inside another one": lambda x: Plain(Scaled(x), (Frozen(x), 3)),
    "named tuple": lambda x: Doubling(x, x + 1),
    "tuple": lambda x: Shifted([x, x]),
    "dict": lambda x: Named(logits=x),
    "ordered dict": lambda x: Ordered(logits=x, other=x + 1),
}


class Returning(nn.Module):
    def __init__(self, make: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.make = make

    def forward(self, x: torch.Tensor) -> Any:
        return self.make(self.linear(x))


class Around(nn.Module):
    def __init__(self, make: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.inner = Returning(make)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.inner(x)
        return self.relu(next(iter(tensors_in(found))))


def tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if dataclasses.is_dataclass(value):
        return [tensor for field in dataclasses.fields(value) for tensor in tensors_in(getattr(value, field.name))]
    items: list[Any] = [*value.values()] if isinstance(value, dict) else [*value] if isinstance(value, tuple) else []
    return [tensor for item in items for tensor in tensors_in(item)]


def assert_same(value: Any, expected: Any) -> None:
    assert type(value) is type(expected)
    pairs = zip(tensors_in(value), tensors_in(expected), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_it_is_returned_as_the_model_returns_it(make: Callable[[torch.Tensor], Any]) -> None:
    model = Returning(make)
    expected = model(X + 1)
    assert_same(featx.create_feature_extractor(model, ["output"], example_inputs=X)(X + 1)["output"], expected)
    assert_same(featx.trace(model, X)(X + 1), expected)
    assert_same(featx.symbolic_trace(model)(X + 1), expected)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_copy_of_it_holds_what_it_held(make: Callable[[torch.Tensor], Any]) -> None:
    # The layer after it writes one of its tensors in place, so that it is cloned.
    model = Around(make)
    expected = model.inner(X + 1)
    for nodes in (["inner", "relu"], ["inner", "inner.linear", "relu"]):
        assert_same(featx.create_feature_extractor(model, nodes, example_inputs=X)(X + 1)["inner"], expected)


@pytest.mark.slow
@pytest.mark.parametrize("make", WITH_ATTRIBUTES.values(), ids=WITH_ATTRIBUTES)
def test_attributes_of_a_tuple_or_dict_are_returned_too(make: Callable[[torch.Tensor], Any]) -> None:
    model = Returning(make)
    expected = model(X + 1)
    extractor = featx.create_feature_extractor(model, ["output"], example_inputs=X)
    for found in (extractor(X + 1)["output"], featx.trace(model, X)(X + 1), featx.symbolic_trace(model)(X + 1)):
        assert_same(found, expected)
        assert found.rows == expected.rows
        assert not hasattr(expected, "mean") or torch.equal(found.mean, expected.mean)


@pytest.mark.slow
def test_items_that_are_attributes_stay_so() -> None:
    found = featx.trace(Returning(lambda x: ItemsAsAttributes(logits=x)), X)(X)
    found.extra = 3
    assert found["extra"] == 3


@pytest.mark.parametrize("kind", [Counted, ListInSlots])
def test_copy_of_a_sequence_keeps_its_attributes(kind: Any) -> None:
    copied = featx.tree.clone_tensors(with_attributes(kind([X]), rows=3))
    assert type(copied) is kind
    assert copied.rows == 3
    assert torch.equal(copied[0], X)


def test_list_of_a_class_keeps_what_it_held_in_a_copy() -> None:
    copied = featx.tree.clone_tensors(Listed([X]))
    assert type(copied) is Listed
    assert torch.equal(copied[0], X + 1)


def test_plain_dataclass_is_written_as_a_call_of_its_class() -> None:
    code = featx.trace(Returning(Plain), X).code
    assert "Plain(logits = linear, extra = None)" in code
