"""Inputs that are objects: what is inside is followed, and what is taken as a constant is checked."""

from __future__ import annotations

import collections
import dataclasses
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import BatchEncoding, BatchFeature

import featx
from featx.tracing.objects.structure import leaves_of

X = torch.rand(3, 4, generator=torch.Generator().manual_seed(0))
OTHER = X + 1


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    scale: float = 2.0


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: torch.Tensor


class Plain:
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


class Slotted:
    __slots__ = ("x",)

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


class Dict(dict[str, Any]):
    weight: torch.Tensor

    def __missing__(self, key: str) -> torch.Tensor:
        return self.weight


class SlottedDict(dict[str, Any]):
    __slots__ = ("weight",)


class OwnOrderedDict(collections.OrderedDict[str, Any]):
    pass


class List(list[Any]):
    pass


class Tuple(tuple[Any, ...]):
    pass


class Named(collections.namedtuple("Named", ["x"])):  # pyright: ignore[reportUntypedNamedTuple]
    pass


class Deque(collections.deque[Any]):
    pass


class Reading(nn.Module):
    def __init__(self, read: Callable[[Any], torch.Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.read = read

    def forward(self, batch: Any) -> torch.Tensor:
        return self.linear(self.read(batch))


def attribute(batch: Any) -> torch.Tensor:
    return batch.x


def item(batch: Any) -> torch.Tensor:
    return batch["x"]


FOLLOWED: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = {
    "dataclass": (Batch, attribute),
    "frozen dataclass": (Frozen, attribute),
    "namespace": (lambda x: types.SimpleNamespace(x=x), attribute),
    "object": (Plain, attribute),
    "slots": (Slotted, attribute),
    "user dict": (lambda x: collections.UserDict(x=x), item),
    "mapping": (lambda x: types.MappingProxyType({"x": x}), item),
    "default dict": (lambda x: collections.defaultdict(list, x=x), item),
    "deque": (lambda x: collections.deque([x]), lambda batch: batch[0]),
    "list of objects": (lambda x: [Plain(x)], lambda batch: batch[0].x),
    "dict of objects": (lambda x: {"a": Plain(x)}, lambda batch: batch["a"].x),
    "object of lists": (lambda x: types.SimpleNamespace(x=[x]), lambda batch: batch.x[0]),
    "BatchEncoding": (lambda x: BatchEncoding({"x": x}), item),
    "BatchFeature": (lambda x: BatchFeature({"x": x}), item),
}


@pytest.mark.parametrize("kind", FOLLOWED)
def test_tensors_in_an_object_are_followed(kind: str) -> None:
    make, read = FOLLOWED[kind]
    model = Reading(read)
    example = make(X)
    traced = featx.trace(model, example)
    extractor = featx.create_feature_extractor(model, ["linear"], example_inputs=(example,))
    assert read(example) is X
    for x in (X, OTHER, torch.rand(5, 4)):
        expected = model(make(x))
        assert torch.equal(traced(make(x)), expected)
        assert torch.equal(extractor(make(x))["linear"], expected)


def _first(batch: Any) -> torch.Tensor:
    return batch["x"] if isinstance(batch, dict) else batch[0]


def _with_weight(kind: Any, x: torch.Tensor, weight: Any) -> Any:
    made = kind(x=x) if issubclass(kind, (dict, Named)) else kind([x])
    made.weight = weight
    return made


CONTAINERS = [Dict, SlottedDict, OwnOrderedDict, List, Tuple, Named, Deque]


@pytest.mark.parametrize("kind", CONTAINERS)
@pytest.mark.parametrize("is_nested", [False, True])
def test_attributes_of_a_container_are_followed(kind: Any, is_nested: bool) -> None:
    def make(x: torch.Tensor, weight: torch.Tensor) -> Any:
        return [_with_weight(kind, x, [weight])] if is_nested else _with_weight(kind, x, [weight])

    def read(batch: Any) -> torch.Tensor:
        batch = batch[0] if is_nested else batch
        return _first(batch) * batch.weight[0]

    model = Reading(read)
    example = make(X, X)
    traced = featx.trace(model, example)
    extractor = featx.create_feature_extractor(model, ["linear"], example_inputs=(example,))
    assert read(example).equal(X * X)
    for x in (X, OTHER, torch.rand(5, 4)):
        expected = model(make(x, x + 1))
        assert torch.equal(traced(make(x, x + 1)), expected)
        assert torch.equal(extractor(make(x, x + 1))["linear"], expected)


@pytest.mark.parametrize("kind", CONTAINERS)
def test_numbers_and_absence_of_attributes_of_a_container_are_checked(kind: Any) -> None:
    model = Reading(lambda batch: _first(batch) * getattr(batch, "weight", 1.0))
    traced = featx.trace(model, _with_weight(kind, X, 2.0))
    assert torch.equal(traced(_with_weight(kind, OTHER, 2.0)), model(_with_weight(kind, OTHER, 2.0)))
    with pytest.raises(featx.SpecializationError, match=r"input 'batch.weight': 3.0 now"):
        traced(_with_weight(kind, X, 3.0))
    adaptive = featx.create_feature_extractor(
        model, ["linear"], example_inputs=(_with_weight(kind, X, 2.0),), adaptive=True
    )
    other = _with_weight(kind, X, 3.0)
    assert torch.equal(adaptive(other)["linear"], model(other))
    without = featx.trace(model, kind(x=X) if issubclass(kind, (dict, Named)) else kind([X]))
    with pytest.raises(featx.SpecializationError, match="form of input 'batch'"):
        without(_with_weight(kind, X, 3.0))


def test_attribute_that_is_read_for_a_missing_key_is_followed() -> None:
    model = Reading(lambda batch: batch["x"] * batch["other"])
    traced = featx.trace(model, _with_weight(Dict, X, X))
    assert torch.equal(traced(_with_weight(Dict, X, OTHER)), model(_with_weight(Dict, X, OTHER)))


def test_attributes_reach_a_module_that_is_kept_whole() -> None:
    for kind in (Dict, List, Tuple):
        model = nn.Sequential(Reading(lambda batch: _first(batch) * batch.weight), nn.ReLU())
        extractor = featx.create_feature_extractor(model, ["1"], example_inputs=(_with_weight(kind, X, X),))
        other = _with_weight(kind, OTHER, OTHER)
        assert torch.equal(extractor(other)["1"], model(other))


def test_attribute_that_forward_assigns_is_refused() -> None:
    def read(batch: Any) -> torch.Tensor:
        batch.weight = batch["x"] * 2
        return batch.weight

    with pytest.raises(featx.TraceError, match="stores a value in the input 'batch'"):
        featx.trace(Reading(read), _with_weight(Dict, X, X))


def test_container_that_is_an_attribute_of_itself_is_followed() -> None:
    def make(x: torch.Tensor) -> Any:
        made = _with_weight(Dict, x, x + 1)
        made.whole = made
        return made

    model = Reading(lambda batch: batch.whole.whole["x"] * batch.whole.weight)
    traced = featx.trace(model, make(X))
    assert torch.equal(traced(make(OTHER)), model(make(OTHER)))


def test_factory_of_a_default_dict_is_checked() -> None:
    def make(x: torch.Tensor, value: float) -> Any:
        return collections.defaultdict(lambda: value, x=x)

    model = Reading(lambda batch: batch["x"] + batch["bias"])
    traced = featx.trace(model, make(X, 0.0))
    assert torch.equal(traced(make(OTHER, 0.0)), model(make(OTHER, 0.0)))
    assert not torch.equal(model(make(X, 0.0)), model(make(X, 1.0)))
    with pytest.raises(featx.SpecializationError, match="default_factory"):
        traced(make(X, 1.0))
    with pytest.raises(featx.SpecializationError, match="form of input 'batch'"):
        traced({"x": X})


class Text(str):
    weight: torch.Tensor


class OwnSet(set[int]):
    weight: torch.Tensor


@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize("kind", [Text, OwnSet])
def test_text_or_set_with_attributes_is_refused(kind: Any, is_nested: bool) -> None:
    value = kind()
    value.weight = X
    model = Reading(lambda batch: (batch[0] if is_nested else batch).weight)
    with pytest.raises(featx.TraceError, match="with the attribute 'weight'"):
        featx.trace(model, [value] if is_nested else value)


def test_number_in_an_object_is_checked() -> None:
    model = Reading(lambda batch: batch.x * batch.scale)
    traced = featx.trace(model, Batch(X))
    assert torch.equal(traced(Batch(OTHER)), model(Batch(OTHER)))
    with pytest.raises(featx.SpecializationError):
        traced(Batch(X, 3.0))


def test_object_with_other_attributes_is_refused() -> None:
    traced = featx.trace(Reading(attribute), types.SimpleNamespace(x=X, mask=None))
    with pytest.raises(featx.SpecializationError, match="form of input 'batch'"):
        traced(types.SimpleNamespace(x=X, mask=X))


CONSTANTS: dict[str, tuple[Any, Any, Callable[[Any], torch.Tensor]]] = {
    "numpy": (np.zeros(4), np.ones(4), lambda batch: torch.full((1, 4), float(batch[0]))),
    "bytes": (b"a", b"b", lambda batch: torch.full((1, 4), float(batch[0]))),
    "slice": (slice(0, 1), slice(0, 2), lambda batch: torch.arange(12.0).view(3, 4)[batch]),
    "range": (range(1), range(2), lambda batch: torch.full((1, 4), float(len(batch)))),
    "set": ({1}, {2}, lambda batch: torch.full((1, 4), float(max(batch)))),
}


@pytest.mark.parametrize("kind", CONSTANTS)
def test_what_is_taken_as_a_constant_is_checked(kind: str) -> None:
    given, other, read = CONSTANTS[kind]
    model = Reading(read)
    traced = featx.trace(model, given)
    assert torch.equal(traced(given), model(given))
    with pytest.raises(featx.TraceError):
        traced(other)


def test_iterator_is_refused_and_not_used_up() -> None:
    given = iter([X])
    with pytest.raises(featx.TraceError, match="holds a list_iterator"):
        featx.trace(Reading(lambda batch: next(batch)), given)
    assert next(given) is X


def test_input_in_which_forward_keeps_something_is_refused() -> None:
    def keep(batch: Any) -> torch.Tensor:
        batch.cache = batch.x * 2
        return batch.cache

    with pytest.raises(featx.TraceError, match="stores a value in the input 'batch'"):
        featx.trace(Reading(keep), Plain(X))


def test_leaves_have_the_way_to_them() -> None:
    def ways(value: Any) -> Iterator[str]:
        for _, path in leaves_of(value):
            yield "".join(f".{key}" if function is getattr else f"[{key!r}]" for function, key in path)

    assert list(ways({"a": [1, Plain(X)], "b": (2,)})) == ["['a'][0]", "['a'][1].x", "['b'][0]"]


def test_object_that_holds_itself_is_copied_once() -> None:
    batch: Any = types.SimpleNamespace(x=X)
    batch.owner = batch
    model = Reading(lambda batch: batch.owner.owner.x)
    other: Any = types.SimpleNamespace(x=OTHER)
    other.owner = other
    assert torch.equal(featx.trace(model, batch)(other), model(other))
