"""What a call that is one node gives besides tensors: numbers and objects, which Python reads unheard."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import types
from collections import deque, namedtuple
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import featx
from featx import SpecializationError, TraceError

Pair = namedtuple("Pair", "number tensor")


class Box:
    def __init__(self, number: Any, tensor: torch.Tensor) -> None:
        self.number, self.tensor = number, tensor


class Slots:
    __slots__ = ("number", "tensor")

    def __init__(self, number: Any, tensor: torch.Tensor) -> None:
        self.number, self.tensor = number, tensor


@dataclasses.dataclass(frozen=True)
class Frozen:
    number: Any
    tensor: torch.Tensor


class Deep:
    def __init__(self, number: Any, tensor: torch.Tensor) -> None:
        self._inside = [{"box": Box(number, tensor)}]

    number = property(lambda self: self._inside[0]["box"].number)
    tensor = property(lambda self: self._inside[0]["box"].tensor)


class OwnList(list[Any]):
    extra: Any


class OwnTuple(tuple[Any, ...]):
    extra: Any


class OwnDict(dict[int, Any]):
    extra: Any


def with_extra(container: Any, extra: Any) -> Any:
    container.extra = extra
    return container


@featx.wrap
def make(kind: Callable[..., Any], number: Any, tensor: torch.Tensor) -> Any:
    return kind(number(tensor) if callable(number) else number, tensor * 2)


@featx.wrap
def call(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


class Whole(nn.Module):
    """A leaf that does what a function does."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


class Uses(nn.Module):
    def __init__(self, function: Callable[..., Any], use: Callable[..., Any], *, by_module: bool) -> None:
        super().__init__()
        self.whole = Whole(function) if by_module else None
        self.function, self.use = function, use

    def forward(self, x: torch.Tensor) -> Any:
        result = call(self.function, x) if self.whole is None else self.whole(x)
        return self.use(result, x)


class Applies(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x)


def traced(model: nn.Module, example: torch.Tensor) -> Any:
    options: Any = {"example_inputs": example, "tracer_kwargs": {"leaf_modules": [Whole]}}
    try:
        last = featx.get_graph_node_names(model, **options)[1][-1]
    except UserWarning as warning:  # forward cannot be followed to its end
        raise featx.TraceError(str(warning)) from warning
    extractor = featx.create_feature_extractor(model, [last], **options)
    return lambda *args: extractor(*args)[last]


def size(x: torch.Tensor) -> int:
    return x.shape[0]


def is_positive(x: torch.Tensor) -> bool:
    return x.sum().item() > 0


@pytest.mark.parametrize("by_module", [True, False])
@pytest.mark.parametrize("kind", [Pair, lambda n, t: {"n": n, "t": t}, lambda n, t: [n, t], lambda n, t: (n, (t,))])
def test_numbers_in_containers_are_followed(kind: Any, by_module: bool) -> None:
    def multiplied(result: Any, x: torch.Tensor) -> torch.Tensor:
        number = result["n"] if isinstance(result, dict) else result[0]
        return x * number

    model = Uses(lambda x: kind(size(x), x * 2), multiplied, by_module=by_module)
    extractor = traced(model, torch.rand(2, 3))
    for count in (2, 5):
        x = torch.rand(count, 3)
        assert torch.equal(extractor(x), model(x))


@pytest.mark.parametrize("by_module", [True, False])
def test_functions_around_a_variable_without_a_value_are_results(by_module: bool) -> None:
    def make_function(x: torch.Tensor) -> tuple[Callable[[], int], torch.Tensor]:
        if x.dim() == 0:
            number = 1
        return lambda: number, x * 2  # pyright: ignore[reportPossiblyUnboundVariable] - that is the point

    model = Uses(make_function, lambda result, x: result[1] + 1, by_module=by_module)
    x = torch.rand(2, 3)
    assert torch.equal(traced(model, x)(x), model(x))


NUMBERS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "attribute": (lambda n: Box(n, torch.ones(1)), lambda box: box.number),
    "slot": (lambda n: Slots(n, torch.ones(1)), lambda box: box.number),
    "frozen": (lambda n: Frozen(n, torch.ones(1)), lambda box: box.number),
    "deep": (lambda n: Deep(n, torch.ones(1)), lambda box: box.number),
    "in a list": (lambda n: [Box(n, torch.ones(1))], lambda boxes: boxes[0].number),
    "attribute of a list": (lambda n: with_extra(OwnList(), n), lambda items: items.extra),
    "attribute of a tuple": (lambda n: with_extra(OwnTuple(), n), lambda items: items.extra),
    "attribute of a dict": (lambda n: with_extra(OwnDict(), n), lambda items: items.extra),
    "set": (lambda n: set(range(int(n))), len),
    "deque": (lambda n: deque([0] * int(n)), len),
    "length of a dict": (lambda n: dict.fromkeys(range(int(n)), 0), len),
    "array": (lambda n: np.full(2, n), lambda array: float(array.sum())),
    "number of numpy": (lambda n: np.int64(n), int),
    "float of numpy": (lambda n: np.float64(n), float),
    "complex": (complex, lambda number: number.real),
    "decimal": (lambda n: Decimal(int(n)), int),
    "text": (lambda n: "a" * int(n), len),
    "bytes": (lambda n: b"a" * int(n), len),
    "range": (lambda n: range(int(n)), len),
    "slice": (lambda n: slice(0, int(n)), lambda part: part.stop),
    "closure": (lambda n: lambda: n, lambda function: function()),
    "default": (lambda n: lambda number=n: number, lambda function: function()),
    "partial": (lambda n: functools.partial(float, n), lambda function: function()),
    "method": (lambda n: Box(n, torch.ones(1)).__getattribute__, lambda get: get("number")),
    "iterator": (lambda n: iter([n]), next),
    "generator": (lambda n: (number for number in [n]), next),
}


@pytest.mark.slow
@pytest.mark.parametrize("by_module", [True, False])
@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("of", [size, lambda x: 2 + is_positive(x)], ids=["sizes", "values"])
def test_a_number_that_python_reads_is_never_that_of_the_example(of: Any, name: str, by_module: bool) -> None:
    give, take = NUMBERS[name]
    model = Uses(lambda x: give(of(x)), lambda result, x: x * take(result), by_module=by_module)
    first, other = torch.rand(3, 3), -torch.rand(2, 3)
    try:
        extractor = traced(model, first)
    except TraceError:
        assert name in ("iterator", "generator", "method")
        return
    assert torch.equal(extractor(first), model(first))
    with contextlib.suppress(SpecializationError):
        assert torch.equal(extractor(other), model(other))


@pytest.mark.parametrize("by_module", [True, False])
@pytest.mark.parametrize("is_none", [lambda x: size(x) > 3, lambda x: is_positive(-x)], ids=["sizes", "values"])
def test_a_call_that_gives_none_for_other_inputs(is_none: Any, by_module: bool) -> None:
    def maybe(x: torch.Tensor) -> torch.Tensor | None:
        return None if is_none(x) else x + 1

    model = Uses(maybe, lambda result, x: x * 2 if result is None else result * 3, by_module=by_module)
    extractor = traced(model, torch.rand(2, 3))
    x = torch.rand(2, 3)
    assert torch.equal(extractor(x), model(x))
    with pytest.raises(SpecializationError, match="returns is None now, a tensor on the example"):
        extractor(-torch.rand(4, 3))


def test_an_object_is_passed_on_as_what_the_call_gives() -> None:
    model = Applies(lambda x: call(lambda box: box.tensor * box.tensor.shape[0], call(lambda y: Box("a", y + 1), x)))
    extractor = traced(model, torch.rand(2, 3))
    x = torch.rand(4, 3)
    assert torch.equal(extractor(x), model(x))


def test_a_tensor_deep_in_an_object_is_followed() -> None:
    model = Applies(lambda x: call(lambda y: Deep("a", y + 1), x).tensor * 2)
    extractor = traced(model, torch.rand(2, 3))
    x = torch.rand(4, 3)
    assert torch.equal(extractor(x), model(x))


@pytest.mark.parametrize("by_module", [True, False])
@pytest.mark.parametrize("kind", [lambda x: OwnList([x]), lambda x: OwnTuple([x]), lambda x: OwnDict({0: x})])
def test_tensors_in_attributes_of_containers_are_followed_and_passed_on(kind: Any, by_module: bool) -> None:
    def use(items: Any, x: torch.Tensor) -> torch.Tensor:
        return items.extra[0] + call(lambda given: given[0] * given.extra[0], items)

    model = Uses(lambda x: with_extra(kind(x * 2), [x + 1]), use, by_module=by_module)
    extractor = traced(model, torch.rand(2, 3))
    for count in (2, 5):
        x = torch.rand(count, 3)
        assert torch.equal(extractor(x), model(x))


@pytest.mark.parametrize("change", [lambda box: setattr(box, "number", 7), lambda box: setattr(box, "tensor", None)])
def test_an_object_that_forward_changes_is_refused(change: Any) -> None:
    def changed(x: torch.Tensor) -> Any:
        box = call(lambda y: Box(1, y + 1), x)
        change(box)
        return call(lambda box: box.number, box), x

    with pytest.raises(TraceError, match="stores a value in an object that 'call' gave, a Box"):
        featx.trace(Applies(changed), torch.rand(2, 3))


class GivesBox(nn.Module):
    """Is kept whole, as it chooses a backend."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.boxes: list[Box] = []
        self.keeps = False

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Box]:
        with sdpa_kernel(SDPBackend.MATH):
            box = Box(None, self.linear(x))
        if self.keeps and not self.boxes:
            self.boxes.append(box)
        return x * 2, self.boxes[0] if self.keeps else box


def number_of(box: Box) -> Any:
    with sdpa_kernel(SDPBackend.MATH):
        return torch.relu(box.number)


class StoresInBox(nn.Module):
    """Stores a tensor in an object that a part has made; what it does with the object, a test says."""

    def __init__(self, use: Callable[[StoresInBox, Box], Any]) -> None:
        super().__init__()
        self.gives, self.after, self.use = GivesBox(), nn.Linear(3, 3), use
        self.whole = Whole(number_of)

    def forward(self, x: torch.Tensor) -> Any:
        twice, box = self.gives(x)
        box.number = x + 1
        return self.after(twice) + box.number * box.tensor, self.use(self, box)


def test_forward_may_store_in_an_object_of_which_the_graph_uses_the_tensors() -> None:
    model = StoresInBox(lambda _, box: box.number)
    for names in (["after"], ["after", "output"]):
        extractor = featx.create_feature_extractor(model, names, example_inputs=torch.rand(2, 3))
        x = torch.rand(5, 3)
        expected = model(x)
        found = extractor(x)
        assert torch.equal(found["after"], model.after(x * 2))
        assert all(map(torch.equal, found.get("output", expected), expected))


@pytest.mark.parametrize("use", [lambda _, box: box, lambda _, box: [box], lambda model, box: model.whole(box)])
def test_an_object_in_which_forward_stores_is_not_used_without_what_it_stored(use: Callable[..., Any]) -> None:
    with pytest.raises(TraceError, match="stores a value in an object that 'gives' gave, a Box"):
        featx.create_feature_extractor(StoresInBox(use), ["after", "output"], example_inputs=torch.rand(2, 3))


def test_an_object_in_which_forward_stores_is_not_returned_as_a_feature() -> None:
    model = StoresInBox(lambda _, box: box.number)
    with pytest.raises(TraceError, match="stores a value in an object that 'gives' gave, a Box"):
        featx.create_feature_extractor(model, ["gives", "after"], example_inputs=torch.rand(2, 3))


def test_forward_may_not_store_in_an_object_that_a_part_keeps() -> None:
    model = StoresInBox(lambda _, box: box.number)
    model.gives.keeps = True
    model(torch.rand(2, 3))
    with pytest.raises(TraceError):
        featx.create_feature_extractor(model, ["after"], example_inputs=torch.rand(2, 3))


def test_an_object_that_holds_an_input_at_times() -> None:
    def hold(x: torch.Tensor) -> Box:
        return Box(1, x if is_positive(x) else x + 1)

    model = Uses(hold, lambda box, x: box.tensor * 2 + x, by_module=False)
    extractor = traced(model, torch.rand(2, 3))
    x = torch.rand(2, 3)
    assert torch.equal(extractor(x), model(x))
    with pytest.raises(SpecializationError, match="a tensor in what a call gives is one that the model had"):
        extractor(-x)


def with_attributes(x: torch.Tensor) -> Any:
    result: Any = x + 1
    result.kind, result.mask, result.parts = "large" if is_positive(x) else "small", x > 0, {"first": [x * 3]}
    return result


@pytest.mark.parametrize("by_module", [True, False])
@pytest.mark.parametrize("size", [3, 3000], ids=["small", "large"])
def test_attributes_of_a_tensor_that_a_call_gives(by_module: bool, size: int) -> None:
    def use(result: Any, x: torch.Tensor) -> torch.Tensor:
        return (result * result.mask + result.parts["first"][0]) * (2 if result.kind == "large" else 3)

    model = Uses(with_attributes, use, by_module=by_module)
    extractor = traced(model, torch.rand(2, size))
    x = torch.rand(2, size)
    assert torch.equal(extractor(x), model(x))
    with pytest.raises(SpecializationError, match=r"'?small'? now, '?large'? on the example"):
        extractor(-x)


HOLDERS = {
    "a namespace": lambda x: types.SimpleNamespace(kept=x, tensor=x + 1),
    "an object": lambda x: Box(1, x),
    "slots": lambda x: Slots(1, x),
    "deep in an object": lambda x: Deep(1, x),
    "a namespace in a list": lambda x: [x + 1, types.SimpleNamespace(kept=x)],
    "a function": lambda x: lambda: x,
}


@pytest.mark.parametrize("holder", HOLDERS.values(), ids=HOLDERS.keys())
def test_an_object_whose_tensor_is_overwritten_later_is_no_feature(holder: Any) -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            doubled = x * 2
            call(holder, doubled)
            doubled.add_(1)
            return doubled * 3

    model, x = Model().eval(), torch.rand(2, 3)
    extractor = featx.create_feature_extractor(model, ["mul", "call", "mul_1"], example_inputs=(x,))
    with pytest.raises(featx.RequestError, match="overwritten later"):
        extractor(x)
    features = featx.create_feature_extractor(model, ["mul", "mul_1"], example_inputs=(x,))(x)
    assert torch.equal(features["mul"], x * 2)
    assert torch.equal(features["mul_1"], (x * 2 + 1) * 3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Box, Slots, Frozen, Deep, lambda number, x: [{"kept": Box(number, x)}]])
def test_a_call_that_writes_a_tensor_in_an_object(kind: Any) -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            doubled = x * 2
            box = call(kind, 1, doubled)
            call(write, box)
            return doubled * 3

    def write(box: Any) -> None:
        (box[0]["kept"] if isinstance(box, list) else box).tensor.add_(1)

    model, x = Model().eval(), torch.rand(2, 3)
    features = featx.create_feature_extractor(model, ["mul", "mul_1"], example_inputs=(x,))(x)
    assert torch.equal(features["mul"], x * 2)
    assert torch.equal(features["mul_1"], (x * 2 + 1) * 3)
    alone = featx.create_feature_extractor(model, ["mul_1"], example_inputs=(x,))(x)
    assert torch.equal(alone["mul_1"], (x * 2 + 1) * 3)
