"""Objects that forward returns: made in it, or given to it and filled; against what the model returns."""

from __future__ import annotations

import weakref
from collections import UserDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import featx
from featx.tracing.objects.structure import leaves_of


class Batch:
    """Holds its fields in a dict."""

    def __init__(self, **fields: Any) -> None:
        self.fields = fields

    def __getitem__(self, key: str) -> Any:
        return self.fields[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.fields[key] = value


class Callable_(Batch):
    def __call__(self) -> Any:
        return self.fields


class Slotted:
    __slots__ = ("count", "y")

    def __init__(self, y: torch.Tensor, count: int) -> None:
        self.y, self.count = y, count


class Returns(nn.Module):
    def __init__(self, make: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.make = nn.Linear(4, 4), make

    def forward(self, x: torch.Tensor) -> Any:
        return self.make(self.linear(x))


class ReadsY(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, batch: Any) -> torch.Tensor:
        return self.linear(batch["y"])


class Fills(nn.Module):
    """Puts values into the object that it is given, and returns it or uses it."""

    def __init__(self, result: str) -> None:
        super().__init__()
        self.first, self.second, self.result = nn.Linear(4, 4), ReadsY(), result

    def forward(self, batch: Any) -> Any:
        batch["y"] = self.first(batch["x"])
        if self.result == "what a submodule makes of it":
            return self.second(batch)
        if self.result == "it, after a submodule":
            self.second(batch)
        return {"batch": batch, "y": batch["y"]} if self.result == "it in a dict" else batch


def tensors_in(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf, _ in leaves_of(value) if isinstance(leaf, torch.Tensor)]


def assert_same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    ours, theirs = tensors_in(found), tensors_in(expected)
    assert len(ours) == len(theirs) > 0
    assert all(map(torch.equal, ours, theirs))


MADE: dict[str, Callable[[torch.Tensor], Any]] = {
    "an object": lambda y: Batch(y=y, rows=y.shape[0]),
    "a callable one": lambda y: Callable_(y=y),
    "a namespace": lambda y: SimpleNamespace(y=[y, y + 1], rows=y.shape[0]),
    "slots": lambda y: Slotted(y, y.shape[0]),
    "a UserDict": lambda y: UserDict(y=y),
    "objects in objects": lambda y: Batch(inner=SimpleNamespace(y=y), other=(Batch(y=y * 2),)),
    "what no graph holds": lambda y: SimpleNamespace(
        y=y, array=np.array([1, 2]), number=np.float32(3), kinds={1, 2}, dtype=y.dtype, kind=nn.Linear
    ),
    "one twice": lambda y: (lambda made: (made, made))(Batch(y=y)),
}


@pytest.mark.parametrize("name", MADE)
def test_an_object_that_forward_makes_is_returned(name: str) -> None:
    torch.manual_seed(0)
    model, x = Returns(MADE[name]).eval(), torch.rand(3, 4)
    found = featx.create_feature_extractor(model, ["linear", "output"], example_inputs=torch.rand(2, 4))(x)
    assert torch.equal(found["linear"], model.linear(x))
    assert_same(found["output"], model(x))
    if name == "one twice":
        assert found["output"][0] is found["output"][1]
    elif name == "what no graph holds":
        assert {key: repr(value) for key, value in vars(found["output"]).items() if key != "y"} == {
            "array": "array([1, 2])", "number": "np.float32(3.0)", "kinds": "{1, 2}", "dtype": "torch.float32",
            "kind": "<class 'torch.nn.modules.linear.Linear'>",
        }  # fmt: skip
    elif name == "slots":
        assert found["output"].count == 3


def test_an_object_that_holds_itself_is_refused() -> None:
    def holding(y: torch.Tensor) -> Any:
        made = SimpleNamespace(y=y)
        made.own = made
        return made

    with pytest.raises(featx.TraceError, match="a SimpleNamespace that holds itself is returned"):
        featx.create_feature_extractor(Returns(holding).eval(), ["output"], example_inputs=torch.rand(2, 4))


class Linked:
    """Holds itself, as the nodes of a tree hold the one above them."""

    def __init__(self, y: torch.Tensor, is_weak: bool) -> None:
        self.y, self.child = y, SimpleNamespace(y=y + 1)
        self.child.parent = weakref.ref(self) if is_weak else self


@pytest.mark.parametrize("is_weak", [True, False])
def test_values_ahead_of_an_object_that_holds_itself_can_be_requested(is_weak: bool) -> None:
    torch.manual_seed(0)
    model, x = Returns(lambda y: Linked(y, is_weak)).eval(), torch.rand(3, 4)
    example = torch.rand(2, 4)
    assert torch.equal(
        featx.create_feature_extractor(model, ["linear"], example_inputs=example)(x)["linear"], model.linear(x)
    )
    with pytest.raises(featx.TraceError, match="a weak reference" if is_weak else "a Linked that holds itself"):
        featx.create_feature_extractor(model, ["output"], example_inputs=example)


@pytest.mark.parametrize("kind", [dict, UserDict, Batch])
@pytest.mark.parametrize("result", ["it", "it in a dict", "it, after a submodule", "what a submodule makes of it"])
def test_what_forward_puts_into_an_object_that_it_is_given_is_returned(result: str, kind: type) -> None:
    torch.manual_seed(0)
    model = Fills(result).eval()
    example, x = torch.rand(2, 4), torch.rand(3, 4)
    extractor = featx.create_feature_extractor(model, ["first", "output"], example_inputs=(kind(x=example),))
    given = kind(x=x)
    found, expected = extractor(given), model(kind(x=x))
    assert torch.equal(found["first"], model.first(x))
    assert_same(found["output"], expected)


@pytest.mark.slow
def test_caches_of_transformers_are_returned_and_can_be_gone_on_with() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_embd=16, n_layer=2, n_head=2, vocab_size=20, bos_token_id=None, eos_token_id=None
    )
    model = transformers.GPT2Model(config).eval()
    example = {"input_ids": torch.randint(0, 20, (2, 5)), "use_cache": True}
    extractor = featx.create_feature_extractor(model, ["h.0", "output"], example_inputs=example)
    ids, following = torch.randint(0, 20, (3, 7)), torch.randint(0, 20, (3, 1))
    found, expected = extractor(input_ids=ids, use_cache=True)["output"], model(input_ids=ids, use_cache=True)
    assert_same(found.cache, expected.cache)
    ours, theirs = (model(input_ids=following, cache=each.cache) for each in (found, expected))
    assert torch.equal(ours.last_hidden_state, theirs.last_hidden_state)


@pytest.mark.parametrize("names", [["output"], ["inner", "output"]])
@pytest.mark.parametrize("way", ["del", "vars", "delattr"])
def test_attribute_that_forward_takes_out_of_what_a_module_returned(way: str, names: list[str]) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Returns(lambda y: SimpleNamespace(y=y, aux=y * 2))

        def forward(self, x: torch.Tensor) -> Any:
            result = self.inner(x)
            if way == "del":
                del result.aux
            elif way == "vars":
                vars(result).pop("aux")
            else:
                delattr(result, "aux")
            return result

    model, x = Outer().eval(), torch.rand(2, 4)
    found = featx.create_feature_extractor(model, names, example_inputs=x)(x)
    assert vars(found["output"]).keys() == {"y"}
    assert torch.equal(found["output"].y, model(x).y)


class ReturnsSizes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = Returns(lambda y: (y, y.shape[-1:], y.shape, y.shape[1:] + (2,)))
        self.last = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> Any:
        y, *sizes = self.part(x)
        return self.last(y), *sizes


@pytest.mark.parametrize("names", [["part"], ["part", "part.linear"], ["output"], ["output", "part.linear"]])
def test_sizes_are_returned_as_such_whatever_else_is_asked_for(names: list[str]) -> None:
    model = ReturnsSizes()
    extractor = featx.create_feature_extractor(model, names, example_inputs=torch.rand(2, 4))
    x = torch.rand(5, 4)
    found, expected = extractor(x)[names[0]], (model.part if names[0] == "part" else model)(x)
    assert [type(each) for each in found[1:]] == [torch.Size] * 3
    assert found[1:] == expected[1:]
