"""Values outside of the arguments that code sets around the call of a submodule, and puts back after it."""

from __future__ import annotations

import contextvars
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import featx

X = torch.rand(3, 4, generator=torch.Generator().manual_seed(0)) - 0.3

SCALE = 1.0
MODE: str = "plain"
CONTEXT: torch.Tensor | None = None
STACK = [1.0]
OPTIONS: dict[str, Any] = {}
ACTIVATIONS = {"tanh": torch.tanh}
VARIABLE = contextvars.ContextVar("scale", default=1.0)
LOCAL = threading.local()
LOCAL.scale = 1.0
act = torch.tanh


class Config:
    scale = 1.0

    @staticmethod
    def act(x: torch.Tensor) -> torch.Tensor:
        return x.relu()


class Slots:
    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale: Any = 1.0


SLOTS = Slots()


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@contextmanager
def stack(x: torch.Tensor) -> Generator[None]:
    STACK.append(2.0)
    try:
        yield
    finally:
        STACK.pop()


@contextmanager
def context_variable(x: torch.Tensor) -> Generator[None]:
    token = VARIABLE.set(2.0)
    try:
        yield
    finally:
        VARIABLE.reset(token)


def patched(apply: Callable[[pytest.MonkeyPatch, torch.Tensor], None]) -> Callable[[torch.Tensor], Any]:
    """Return a scope that sets something and puts it back at its end."""

    @contextmanager
    def scope(x: torch.Tensor) -> Generator[None]:
        with pytest.MonkeyPatch.context() as patch:
            apply(patch, x)
            yield

    return scope


SCOPES = {
    "stack": stack,
    "context variable": context_variable,
    "number": patched(lambda patch, x: patch.setitem(globals(), "SCALE", 2.0)),
    "string": patched(lambda patch, x: patch.setitem(globals(), "MODE", "doubled")),
    "tensor": patched(lambda patch, x: patch.setitem(globals(), "CONTEXT", x.mean())),
    "function": patched(lambda patch, x: patch.setitem(globals(), "act", double)),
    "function in a dict": patched(lambda patch, x: patch.setitem(ACTIVATIONS, "tanh", double)),
    "new key": patched(lambda patch, x: patch.setitem(OPTIONS, "scale", x.mean())),
    "attribute of a class": patched(lambda patch, x: patch.setattr(Config, "scale", 2.0)),
    "method of a class": patched(lambda patch, x: patch.setattr(Config, "act", staticmethod(double))),
    "slot": patched(lambda patch, x: patch.setattr(SLOTS, "scale", x.mean())),
    "thread local": patched(lambda patch, x: patch.setattr(LOCAL, "scale", 2.0)),
    "function of torch": patched(lambda patch, x: patch.setattr(nn.functional, "gelu", double)),
    "environment variable": patched(lambda patch, x: patch.setenv("SCALE_OF_TEST", "2")),
}


class Scaled(nn.Module):
    """Reads all that a scope may set."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x) * SCALE * Config.scale * STACK[-1] * VARIABLE.get() * LOCAL.scale * SLOTS.scale
        x = (
            nn.functional.gelu(act(Config.act(ACTIVATIONS["tanh"](x))))
            * OPTIONS.get("scale", 1.0)
            * float(os.environ.get("SCALE_OF_TEST", "1"))
        )
        if MODE == "doubled":
            x = x + x
        return x if CONTEXT is None else x * CONTEXT


class Untraceable(Scaled):
    """Cannot be opened: a graph would compute the value once."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * float(x.detach().numpy().sum())


class Net(nn.Module):
    def __init__(self, scope: Any, child: type[Scaled] = Scaled) -> None:
        super().__init__()
        self.scope = scope
        self.before, self.child, self.behind = child(), child(), child()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        with self.scope(x):
            x = self.child(x)
        return self.behind(x)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scope", "request_of"),
    [*((scope, ["output"]) for scope in SCOPES), ("tensor", ["child"]), ("tensor", ["behind", "before"])],
    ids=str,
)
def test_what_a_scope_sets_around_a_submodule_is_what_the_submodule_reads(scope: str, request_of: list[str]) -> None:
    torch.manual_seed(0)
    model = Net(SCOPES[scope]).eval()
    extractor = featx.create_feature_extractor(model, request_of, example_inputs=X)
    for x in (X, X[:2] * 2):
        seen: dict[str, torch.Tensor] = {}
        for name in ("before", "child", "behind"):
            getattr(model, name).register_forward_hook(
                lambda module, args, output, name=name, seen=seen: seen.update({name: output})
            )
        seen["output"] = model(x)
        for name, value in extractor(x).items():
            assert torch.equal(value, seen[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("scope", SCOPES.values(), ids=SCOPES)
def test_submodule_that_cannot_be_opened_is_refused_inside_a_scope(scope: Any) -> None:
    model = Net(scope, Untraceable).eval()
    with pytest.raises(featx.TraceError, match=r"'child'|for a call"):
        featx.create_feature_extractor(model, ["output"], example_inputs=X)


def test_submodules_stay_whole_where_nothing_is_set() -> None:
    model = Net(lambda x: nullcontext()).eval()
    extractor = featx.create_feature_extractor(model, ["output"], example_inputs=X)
    assert [node.target for node in extractor.graph.find_nodes(op="call_module")] == ["before", "child", "behind"]


def weak(owner: nn.Module) -> Callable[[], Any]:
    return weakref.ref(owner)


def proxy(owner: nn.Module) -> Callable[[], Any]:
    reference = weakref.proxy(owner)
    return lambda: reference


def closure(owner: nn.Module) -> Callable[[], Any]:
    return lambda: owner


def method(owner: Any) -> Callable[[], Any]:
    return owner.itself


class Child(nn.Module):
    def __init__(self, owner: Callable[[], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.owner = owner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = self.owner().mask
        return self.linear(x) if mask is None else self.linear(x) * mask


class Masked(nn.Module):
    """Sets its own mask, which the child reads by a reference to it."""

    def __init__(self, reference: Callable[[nn.Module], Callable[[], Any]]) -> None:
        super().__init__()
        self.mask: torch.Tensor | None = None
        self.child = Child(reference(self))

    def itself(self) -> Any:
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mask = (x > 0).float()
        return self.child(x) + 1


@pytest.mark.parametrize("reference", [weak, proxy, closure, method])
def test_child_reads_what_its_parent_has_set_on_itself(reference: Any) -> None:
    torch.manual_seed(0)
    model = Masked(reference).eval()
    extractor = featx.create_feature_extractor(model, ["output"], example_inputs=X)
    assert model.mask is None
    for x in (X, -X):
        assert torch.equal(extractor(x)["output"], model(x))


class Reader(nn.Module):
    def __init__(self, shared: Slots) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.shared = shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.shared.scale


class SharedSlots(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared = Slots()
        self.child = Reader(self.shared)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.shared.scale = (x > 0).float()
        return self.child(x) + 1


def test_child_reads_what_its_parent_has_set_on_an_object_with_slots() -> None:
    model = SharedSlots().eval()
    extractor = featx.create_feature_extractor(model, ["output"], example_inputs=X)
    assert model.shared.scale == 1.0
    for x in (X, -X):
        assert torch.equal(extractor(x)["output"], model(x))


def test_child_that_refers_to_no_changed_module_stays_whole() -> None:
    model = Masked(weak).eval()
    model.child = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    extractor = featx.create_feature_extractor(model, ["output"], example_inputs=X)
    assert [node.target for node in extractor.graph.find_nodes(op="call_module")] == ["child"]
    assert torch.equal(extractor(-X)["output"], model(-X))


class Makers(OrderedDict[str, Any]):
    """Makes what is asked for, as the table of activations of transformers does."""

    asked: ClassVar[list[str]] = []

    def __getitem__(self, key: str) -> Any:
        self.asked.append(key)
        return super().__getitem__(key)()


MAKERS = Makers(relu=nn.ReLU, tanh=nn.Tanh)


def test_items_of_a_dict_in_a_file_are_not_asked_for() -> None:
    class Made(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return MAKERS["relu"](x) if x.dim() > 5 else x + 1

    Makers.asked.clear()
    featx.create_feature_extractor(Made(), ["add"], example_inputs=torch.rand(2, 3))
    assert Makers.asked == []
    assert dict.get(MAKERS, "relu") is nn.ReLU
