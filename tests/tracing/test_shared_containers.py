"""What a model holds and a global of its file holds too: code puts values into one, and finds them in the other."""

from __future__ import annotations

import queue
import random
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import featx

STORE: dict[str, Any] = {}
SLOTS: list[Any] = [None]
STATE = types.SimpleNamespace(kept=None)


class Slotted:
    __slots__ = ("kept",)

    def __init__(self) -> None:
        self.kept: Any = None


SLOTTED = Slotted()


class OfClass:
    store: dict[str, Any] = {}


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)


class InDict(Two):
    def __init__(self) -> None:
        super().__init__()
        self.store = STORE

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        STORE["x"] = self.first(x)
        return self.second(self.store["x"])


class OutOfDict(InDict):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.store["x"] = self.first(x)
        return self.second(STORE["x"])


class InList(Two):
    def __init__(self) -> None:
        super().__init__()
        self.slots = SLOTS

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        SLOTS[0] = self.first(x)
        return self.second(self.slots[0])


class InObject(Two):
    def __init__(self) -> None:
        super().__init__()
        self.state = STATE

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        STATE.kept = self.first(x)
        return self.second(self.state.kept)


class InObjectWithSlots(Two):
    def __init__(self) -> None:
        super().__init__()
        self.state = SLOTTED

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        SLOTTED.kept = self.first(x)
        return self.second(self.state.kept)


class InClass(Two):
    def __init__(self) -> None:
        super().__init__()
        self.store = OfClass.store

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        OfClass.store["x"] = self.first(x)
        return self.second(self.store["x"])


def put(value: Any, store: dict[str, Any] = STORE) -> None:
    store["x"] = value


class ByDefault(InDict):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        put(self.first(x))
        return self.second(self.store["x"])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).relu() + x


def storing(name: str) -> Callable[..., None]:
    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        STORE[name] = output

    return hook


class ByHooks(nn.Module):
    """As in MiDaS and DPT: hooks fill a global dict, which the model has as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block(), Block())
        for name, block in zip("ab", self.blocks, strict=False):
            block.register_forward_hook(storing(name))
        self.activations = STORE
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        last = self.blocks(x)
        return self.head(self.activations["a"] + self.activations["b"].relu() + 0 * last)


KINDS = [InDict, OutOfDict, InList, InObject, InObjectWithSlots, InClass, ByDefault, ByHooks]


@pytest.mark.parametrize("tracer", ["example", "symbolic"])
@pytest.mark.parametrize("has_run", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_value_that_goes_through_both_is_followed(kind: type[nn.Module], has_run: bool, tracer: Any) -> None:
    for store in (STORE, OfClass.store):
        store.clear()
    SLOTS[0] = STATE.kept = SLOTTED.kept = None
    model = kind().eval()
    if has_run:
        model(torch.rand(3, 4))
    before = (dict(STORE), [*SLOTS, SLOTTED.kept], STATE.kept, dict(OfClass.store))
    example = {"example_inputs": torch.rand(2, 4)} if tracer == "example" else {}
    extractor = featx.create_feature_extractor(model, ["output"], tracer=tracer, **example)
    after = (dict(STORE), [*SLOTS, SLOTTED.kept], STATE.kept, dict(OfClass.store))
    assert all(now is then for now, then in zip(values_in(after), values_in(before), strict=True))
    for x in (torch.rand(2, 4), torch.rand(5, 4)):
        assert torch.equal(extractor(x)["output"], model(x))


def values_in(held: tuple[Any, ...]) -> list[Any]:
    dicts, items, value, of_class = held[0], held[1], held[2], held[3]
    return [*dicts.values(), *items, value, *of_class.values()]


class ByHooksOfLayers(ByHooks):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
        for name, block in zip("ab", self.blocks, strict=False):
            block.register_forward_hook(storing(name))


def test_what_hooks_of_layers_store_is_that_of_this_call() -> None:
    model = ByHooksOfLayers().eval()
    model(torch.rand(2, 4))
    extractor = featx.create_feature_extractor(model, ["output"], example_inputs=torch.rand(2, 4))
    for x in (torch.rand(2, 4), torch.rand(5, 4)):
        assert torch.equal(extractor(x)["output"], model(x))


def test_symbolic_traces_refuse_what_hooks_of_layers_have_stored() -> None:
    model = ByHooksOfLayers().eval()
    model(torch.rand(2, 4))
    with pytest.raises(featx.TraceError, match="what a forward hook stores"):
        featx.create_feature_extractor(model, ["output"], tracer="symbolic")


ARRAY = np.zeros(2)
RANDOM = random.Random(0)
BYTES = bytearray(2)
ITEMS: queue.Queue[Any] = queue.Queue()
LEGACY_RANDOM = np.random.RandomState(0)
VIEW = memoryview(bytearray(2))


class Holds(Two):
    def __init__(self) -> None:
        super().__init__()
        self.array, self.random, self.bytes, self.items = ARRAY, RANDOM, BYTES, ITEMS
        self.legacy_random, self.view = LEGACY_RANDOM, VIEW


class InArray(Holds):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ARRAY[0] = 3.0
        return self.first(x) * float(self.array[0])


class InPartOfArray(Holds):
    def __init__(self) -> None:
        super().__init__()
        self.array = ARRAY[1:]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ARRAY[1] = 3.0
        return self.first(x) * float(self.array[0])


class InBytes(Holds):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        BYTES[0] = 3
        return self.first(x) * self.bytes[0]


class InGenerator(Holds):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        RANDOM.seed(5)
        return self.first(x) * self.random.random()


class InQueue(Holds):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ITEMS.put(self.first(x))
        return self.second(self.items.get(block=False))


class InLegacyGenerator(Holds):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        LEGACY_RANDOM.seed(5)
        return self.first(x) * float(self.legacy_random.rand())


class InView(Holds):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        VIEW[0] = 3
        return self.first(x) * self.view[0]


def state_of_file() -> tuple[Any, ...]:
    states = RANDOM.getstate(), LEGACY_RANDOM.get_state()[1].tolist()
    return ARRAY.tolist(), bytes(BYTES), bytes(VIEW), ITEMS.qsize(), *states


# Queues are for threads, whatever they hold; a first seed leaves the generator in another state.
REFUSED = {(InQueue, False), (InQueue, True), (InGenerator, False)}


@pytest.mark.parametrize("has_run", [False, True])
@pytest.mark.parametrize("kind", [InArray, InPartOfArray, InBytes, InGenerator, InQueue, InLegacyGenerator, InView])
def test_object_that_a_model_and_its_file_hold_is_one_in_a_trace(kind: type[nn.Module], has_run: bool) -> None:
    ARRAY[:], BYTES[:], VIEW[:] = 0, bytes(2), bytes(2)
    model = kind().eval()
    if has_run:
        model(torch.rand(2, 4))
    before = state_of_file()
    if (kind, has_run) in REFUSED:
        with pytest.raises(featx.TraceError):
            featx.create_feature_extractor(model, ["output"], example_inputs=torch.rand(2, 4))
        assert state_of_file() == before
        return
    extractor = featx.create_feature_extractor(model, ["output"], example_inputs=torch.rand(2, 4))
    assert state_of_file() == before
    for x in (torch.rand(2, 4), torch.rand(5, 4)):
        assert torch.equal(extractor(x)["output"], model(x))


class HoldsView(Two):
    """An array and a part of it, in either order."""

    def __init__(self, *, is_part_first: bool) -> None:
        super().__init__()
        array = np.zeros(3)
        for name in ("part", "array") if is_part_first else ("array", "part"):
            setattr(self, name, array[1:] if name == "part" else array)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.array[1] = 5
        return self.first(x) * float(self.part[0])


@pytest.mark.parametrize("is_part_first", [False, True])
def test_arrays_of_a_model_that_share_memory_share_it_in_a_trace(is_part_first: bool) -> None:
    model = HoldsView(is_part_first=is_part_first).eval()
    extractor = featx.create_feature_extractor(model, ["output"], example_inputs=torch.rand(2, 4))
    assert model.array.tolist() == [0, 0, 0]
    for x in (torch.rand(2, 4), torch.rand(5, 4)):
        assert torch.equal(extractor(x)["output"], model(x))
