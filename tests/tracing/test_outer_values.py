"""Values outside of the arguments that code sets around the call of a submodule, and puts back after it."""

from __future__ import annotations

import contextvars
import threading
import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import featx

X = torch.rand(3, 4, generator=torch.Generator().manual_seed(0)) - 0.3

SCALE = 1.0
MODE = "plain"
CONTEXT: torch.Tensor | None = None
STACK = [1.0]
OPTIONS: dict[str, Any] = {}
VARIABLE = contextvars.ContextVar("scale", default=1.0)
LOCAL = threading.local()
LOCAL.scale = 1.0


class Config:
    scale = 1.0


class Slots:
    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale: Any = 1.0


SLOTS = Slots()


@contextmanager
def number(x: torch.Tensor) -> Generator[None]:
    global SCALE
    SCALE = 2.0
    try:
        yield
    finally:
        SCALE = 1.0


@contextmanager
def string(x: torch.Tensor) -> Generator[None]:
    global MODE
    MODE = "doubled"
    try:
        yield
    finally:
        MODE = "plain"


@contextmanager
def tensor(x: torch.Tensor) -> Generator[None]:
    global CONTEXT
    CONTEXT = x.mean()
    try:
        yield
    finally:
        CONTEXT = None


@contextmanager
def stack(x: torch.Tensor) -> Generator[None]:
    STACK.append(2.0)
    try:
        yield
    finally:
        STACK.pop()


@contextmanager
def new_key(x: torch.Tensor) -> Generator[None]:
    OPTIONS["scale"] = x.mean()
    try:
        yield
    finally:
        del OPTIONS["scale"]


@contextmanager
def attribute_of_class(x: torch.Tensor) -> Generator[None]:
    Config.scale = 2.0
    try:
        yield
    finally:
        Config.scale = 1.0


@contextmanager
def slot(x: torch.Tensor) -> Generator[None]:
    SLOTS.scale = x.mean()
    try:
        yield
    finally:
        SLOTS.scale = 1.0


@contextmanager
def context_variable(x: torch.Tensor) -> Generator[None]:
    token = VARIABLE.set(2.0)
    try:
        yield
    finally:
        VARIABLE.reset(token)


@contextmanager
def thread_local(x: torch.Tensor) -> Generator[None]:
    LOCAL.scale = 2.0
    try:
        yield
    finally:
        LOCAL.scale = 1.0


SCOPES = [
    number, string, tensor, stack, new_key, attribute_of_class, slot, context_variable, thread_local,
]  # fmt: skip


class Scaled(nn.Module):
    """Reads all that a scope may set."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x) * SCALE * Config.scale * STACK[-1] * VARIABLE.get() * LOCAL.scale * SLOTS.scale
        x = x * OPTIONS.get("scale", 1.0)
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


@pytest.mark.parametrize("request_of", [["output"], ["child"], ["behind", "before"]], ids=str)
@pytest.mark.parametrize("scope", SCOPES)
def test_what_a_scope_sets_around_a_submodule_is_what_the_submodule_reads(scope: Any, request_of: list[str]) -> None:
    torch.manual_seed(0)
    model = Net(scope).eval()
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


@pytest.mark.parametrize("scope", SCOPES)
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
