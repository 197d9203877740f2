"""Extractors that are made in one state of autocast and run in another one; values are those of the eager model."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from sources import run_source
from torch import nn

import featx


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)


class Off(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        with torch.autocast("cpu", enabled=False):
            x = self.second(x.float()) @ x.float().T
        return torch.relu(x @ x)


class OffElsewhere(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", enabled=False):
            return torch.relu(self.second(self.first(x)))


class On(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.first(x)
        return torch.relu(self.second(x.float()))


class OnWithoutDtype(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu"):
            x = self.first(x)
        return torch.relu(self.second(x.float()))


class Nested(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            x = self.first(x.float())
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = self.second(x)
            x = x @ self.second(x).T
        return torch.relu(x + y @ y.T)


class Decorated(Block):
    @torch.autocast("cpu", enabled=False)  # pyright: ignore[reportUntypedFunctionDecorator]
    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(x.float())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.inner(self.first(x)))


class Helper:
    """Asks in a file of its own, as far as a trace can tell."""

    def region(self) -> AbstractContextManager[Any]:
        import torch as library

        is_on = library.is_autocast_enabled("cpu")
        return library.autocast("cpu", enabled=False) if is_on else nullcontext()


class Asks(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        with Helper().region():
            return torch.relu(self.second(x.float()))


class Counts(Block):
    """Fills a cache in its first call, so that a second call is not like it."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: dict[str, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if "scale" not in self.cache:
            self.cache["scale"] = torch.full((1,), 2.0)
        with torch.autocast("cpu", enabled=False):
            return torch.relu(self.second(self.first(x) * self.cache["scale"]))


class OffInTraining(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.autocast("cpu", enabled=False):
                return torch.relu(self.second(self.first(x)))
        return torch.relu(self.second(self.first(x)))


AMBIENT: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "off": nullcontext,
    "bfloat16": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "float16": lambda: torch.autocast("cpu", dtype=torch.float16),
}
FOLLOWED = [Off, OffElsewhere, On, Nested, Decorated, Counts, OffInTraining]


def _keep(seen: dict[str, torch.Tensor], name: str, output: torch.Tensor) -> None:
    seen.setdefault(name, output)  # `name` is the first call of a module


def _assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype is expected.dtype
    assert torch.equal(found, expected)


def inputs() -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def make(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind()


@pytest.mark.slow
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("made", AMBIENT)
@pytest.mark.parametrize("kind", FOLLOWED, ids=lambda kind: kind.__name__)
def test_regions_hold_in_any_state_around_the_extractor(kind: type[nn.Module], made: str, training: bool) -> None:
    model = make(kind).train(training)
    with AMBIENT[made]():
        extractor = featx.create_feature_extractor(
            model, ["first", "second", "relu"], example_inputs=inputs(), suppress_diff_warning=True
        )
        extractor.train(training)
    for around in AMBIENT.values():
        seen: dict[str, torch.Tensor] = {}
        eager = copy.deepcopy(model)
        for name in ("first", "second"):
            eager.get_submodule(name).register_forward_hook(
                lambda module, args, output, name=name, seen=seen: _keep(seen, name, output)
            )
        with around():
            found = extractor(inputs())
            expected = eager(inputs())
        _assert_same(found["relu"], expected)
        for name in ("first", "second"):
            _assert_same(found[name], seen[name])
        assert not torch.is_autocast_enabled("cpu")


def test_gradients_of_a_training_step_are_those_of_the_model() -> None:
    model = make(Off)
    extractor = featx.create_feature_extractor(model, ["relu"], example_inputs=inputs())
    grads: list[list[torch.Tensor]] = []
    for call in (model, lambda x: extractor(x)["relu"]):
        model.zero_grad()
        with AMBIENT["bfloat16"]():
            loss = call(inputs()).sum()
        loss.backward()
        grads.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
    assert len(grads[0]) == 4
    assert all(map(torch.equal, *grads))


@pytest.mark.parametrize(
    ("kind", "made", "run"),
    [
        (Asks, "off", "bfloat16"), (Asks, "off", "float16"), (OnWithoutDtype, "off", "float16"),
        (OnWithoutDtype, "float16", "bfloat16"), (OnWithoutDtype, "bfloat16", "float16"),
    ],
)  # fmt: skip
def test_what_depends_on_the_state_is_refused_in_another_one(kind: type[nn.Module], made: str, run: str) -> None:
    model = make(kind).eval()
    with AMBIENT[made]():
        extractor = featx.create_feature_extractor(model, ["relu"], example_inputs=inputs())
        assert torch.equal(extractor(inputs())["relu"], model(inputs()))
    with AMBIENT[run](), pytest.raises(featx.SpecializationError, match="autocast"):
        extractor(inputs())


def test_what_asks_whether_autocast_is_on_may_be_the_same_in_two_states() -> None:
    model = make(Asks).eval()
    with AMBIENT["float16"]():
        extractor = featx.create_feature_extractor(model, ["relu"], example_inputs=inputs())
    for around in AMBIENT.values():
        with around():
            found, expected = extractor(inputs())["relu"], model(inputs())
        _assert_same(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [OnWithoutDtype, Asks, *FOLLOWED], ids=lambda kind: kind.__name__)
def test_adaptive_extractors_follow_the_state(kind: type[nn.Module]) -> None:
    model = make(kind).eval()
    extractor = featx.create_feature_extractor(model, ["relu"], example_inputs=inputs(), adaptive=True)
    for around in (*AMBIENT.values(), *AMBIENT.values()):
        with around():
            found, expected = extractor(inputs())["relu"], model(inputs())
        _assert_same(found, expected)


def test_where_calls_cannot_be_heard_the_graph_holds_for_one_state() -> None:
    model = make(Off).eval()

    def profiler(*args: Any) -> None:
        pass

    sys.setprofile(profiler)
    try:
        extractor = featx.create_feature_extractor(model, ["relu"], example_inputs=inputs())
        assert sys.getprofile() is profiler
    finally:
        sys.setprofile(None)
    assert torch.equal(extractor(inputs())["relu"], model(inputs()))
    with AMBIENT["bfloat16"](), pytest.raises(featx.SpecializationError, match="autocast"):
        extractor(inputs())


def test_a_model_without_regions_has_no_nodes_for_them() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    extractor = featx.create_feature_extractor(model, ["1"], example_inputs=inputs())
    assert "autocast" not in extractor.code
    with AMBIENT["bfloat16"]():
        assert torch.equal(extractor(inputs())["1"], model(inputs()))


@pytest.mark.parametrize("kind", [Off, On])
def test_a_symbolic_trace_refuses_regions(kind: type[nn.Module]) -> None:
    with pytest.raises(featx.TraceError, match="autocast"):
        featx.symbolic_trace(make(kind))


def test_what_a_trace_sets_around_a_second_call_is_put_back() -> None:
    for around in AMBIENT.values():
        with around():
            before = [(torch.is_autocast_enabled(each), torch.get_autocast_dtype(each)) for each in ("cpu", "cuda")]
            featx.create_feature_extractor(make(Asks), ["relu"], example_inputs=inputs())
            after = [(torch.is_autocast_enabled(each), torch.get_autocast_dtype(each)) for each in ("cpu", "cuda")]
            assert after == before


class InAutocast(nn.Module):
    """Draws a number in Python, so that featx keeps it whole after it has looked into it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu"):
            y = x @ x
        random.random()
        return y


class AfterIt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = InAutocast()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x).float()
        with torch.autocast("cpu"):
            return y @ y


@pytest.mark.slow
def test_the_state_is_checked_behind_a_module_of_which_the_record_was_dropped() -> None:
    model, x = AfterIt().eval(), torch.rand(3, 3)
    traced = featx.trace(model, x)
    assert torch.equal(traced(x), model(x))
    with torch.autocast("cpu", dtype=torch.float16):
        assert model(x).dtype == torch.float16
        with pytest.raises(featx.SpecializationError):
            traced(x)


class AsksDtype(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(torch.get_autocast_dtype("cpu"))


def test_the_dtype_of_autocast_that_code_asks_for_is_checked() -> None:
    model, x = AsksDtype().eval(), torch.rand(3)
    traced = featx.trace(model, x)
    assert traced(x).dtype == torch.bfloat16
    with torch.autocast("cpu", dtype=torch.float16), pytest.raises(featx.SpecializationError):
        traced(x)


ELSEWHERE: dict[str, Any] = run_source("""
import torch
from sources import run_source

def cast(x):
    return x.to(torch.get_autocast_dtype("cpu"))
""")


class CastsElsewhere(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ELSEWHERE["cast"](x)


@pytest.mark.parametrize("made", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_on", [True, False])
def test_so_is_the_one_that_code_of_another_file_asks_for(made: torch.dtype, is_on: bool) -> None:
    model, x = CastsElsewhere().eval(), torch.rand(3)
    with torch.autocast("cpu", dtype=made, enabled=is_on):
        traced = featx.trace(model, x)
        assert traced(x).dtype == made
    other = torch.float16 if made is torch.bfloat16 else torch.bfloat16
    with torch.autocast("cpu", dtype=other, enabled=is_on), pytest.raises(featx.SpecializationError):
        traced(x)


class CastsByDefault(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu"):
            return x @ x


def test_the_dtype_that_autocast_has_by_default_is_checked() -> None:
    model, x = CastsByDefault().eval(), torch.rand(3, 3)
    traced = featx.trace(model, x)
    assert traced(x).dtype == torch.bfloat16
    before = torch.get_autocast_dtype("cpu")
    torch.set_autocast_dtype("cpu", torch.float16)
    try:
        assert model(x).dtype == torch.float16
        with pytest.raises(featx.SpecializationError):
            traced(x)
    finally:
        torch.set_autocast_dtype("cpu", before)
