"""Models that ask whether gradients are enabled: an extractor runs in the mode in which it was made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sources import run_source
from torch import is_grad_enabled, nn

import featx
from featx.tracing.example.trace import ExampleTrace

X = torch.rand(2, 4)


class Asks(nn.Module):
    def __init__(self, asks: Callable[[torch.Tensor], bool]) -> None:
        super().__init__()
        self.first, self.last, self.asks = nn.Linear(4, 4), nn.Linear(4, 4), asks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.asks(x):
            x = x * 2
        return self.last(x)


# Files that the model's own file names in an object alone.
FAR = run_source("""
import torch

def asks(x):
    return torch.is_grad_enabled()

class Config:
    @property
    def is_training(self):
        return torch.is_grad_enabled()
""")
AWAY = run_source("def asks(x): return far['asks'](x)", far=FAR)


QUESTIONS: dict[str, Callable[[torch.Tensor], bool]] = {
    "enabled": lambda x: torch.is_grad_enabled(),
    "enabled, by a name of its own": lambda x: is_grad_enabled(),
    "enabled and required": lambda x: torch.is_grad_enabled() and x.requires_grad,
    "required": lambda x: x.requires_grad,
    "disabled": lambda x: not torch.is_grad_enabled(),
    "enabled, asked two files away": lambda x: AWAY["asks"](x),
    "enabled, asked by a property of another file": lambda x: FAR["Config"]().is_training,
    "enabled, asked here and two files away": lambda x: torch.is_grad_enabled() and AWAY["asks"](x),
}
MAKERS: dict[str, Callable[..., Any]] = {
    "extractor": lambda model: featx.create_feature_extractor(model, ["last"], example_inputs=X, adaptive=False),
    "trace": lambda model: featx.trace(model, X),
}


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("question", QUESTIONS)
def test_it_runs_in_the_mode_in_which_it_was_made(question: str, maker: str, enabled: bool) -> None:
    model = Asks(QUESTIONS[question]).eval()
    with torch.set_grad_enabled(enabled):
        made = MAKERS[maker](model)
        found = made(X)
        assert torch.equal(found if maker == "trace" else found["last"], model(X))
    with torch.set_grad_enabled(not enabled), pytest.raises(featx.SpecializationError, match="grad"):
        made(X)


@pytest.mark.parametrize("enabled", [True, False])
def test_where_the_answer_decides_nothing_it_runs_in_both(enabled: bool) -> None:
    class Region(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            if torch.is_grad_enabled():
                pass
            return self.last(x)

    model = Region().eval()
    with torch.set_grad_enabled(enabled):
        extractor = featx.create_feature_extractor(model, ["first", "last"], example_inputs=X)
    for mode in (True, False):
        with torch.set_grad_enabled(mode):
            found = extractor(X)
            assert torch.equal(found["last"], model(X))
            assert [found[name].requires_grad for name in ("first", "last")] == [mode, mode]


@pytest.mark.parametrize("enabled", [True, False])
def test_the_batch_may_differ_in_either_mode(enabled: bool) -> None:
    class Reads(Asks):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.reshape(x.shape[0], 2, 2).flatten(1))

    model = Reads(QUESTIONS["enabled"]).eval()
    with torch.set_grad_enabled(enabled):
        extractor = featx.create_feature_extractor(model, ["last"], example_inputs=X, adaptive=False)
        batch = torch.rand(5, 4)
        assert torch.equal(extractor(batch)["last"], model(batch))


class AsksAndCatches(Asks):
    """Cannot be looked into, as it catches errors; so what was recorded of its question is taken back."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 2 if self.asks(x) else x
        try:
            return self.last(x)
        except RuntimeError:
            return x


def test_question_of_a_module_that_is_kept_whole_after_all_is_its_own() -> None:
    model = nn.Sequential(AsksAndCatches(QUESTIONS["enabled"]), nn.Linear(4, 4)).eval()
    module = featx.trace(model, X)
    assert torch.equal(module(X), model(X))
    with torch.no_grad():
        assert torch.equal(module(X), model(X))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * 2


class DecidesBehind(nn.Module):
    """Asks for a mode after the last value: what it returns is that value, or another one."""

    def __init__(self, asks: Callable[[torch.Tensor], bool]) -> None:
        super().__init__()
        self.block, self.asks = Block(), asks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.block(x)
        if not self.asks(y):
            y = y * 9
        return y


class DecidesAhead(DecidesBehind):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x) if self.asks(x) else self.block(x) * 9


@pytest.mark.parametrize("adaptive", [None, True])
@pytest.mark.parametrize("kind", [DecidesBehind, DecidesAhead])
@pytest.mark.parametrize(
    "asks",
    [
        lambda y: torch.is_grad_enabled(), lambda y: not torch.is_inference_mode_enabled(), torch.Tensor.is_contiguous,
        lambda y: not torch.is_autocast_enabled("cpu"),
    ],
    ids=["gradients", "inference", "contiguous", "autocast"],
)  # fmt: skip
def test_decision_about_what_the_model_returns_is_checked_wherever_it_comes(
    asks: Callable[[torch.Tensor], bool], kind: type[DecidesBehind], adaptive: bool | None
) -> None:
    model = kind(asks).eval()
    extractor = featx.create_feature_extractor(model, ["output"], example_inputs=X, adaptive=adaptive)
    modes = [torch.enable_grad(), torch.no_grad(), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16)]
    for x in (X, torch.rand(4, 2).t()):
        for mode in modes:
            with mode:
                try:
                    found = extractor(x)["output"]
                except featx.SpecializationError:
                    continue
                assert torch.equal(found, model(x))


class AsksBehindTheFeature(nn.Module):
    """Runs for real behind the feature, because it may write there what the feature is computed from; then it asks."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x) * self.scale
        if y.detach().sum().item() < -1e9:
            self.scale.add_(1)
        return y * 2 if y.requires_grad else y.mul_(2)


@pytest.mark.parametrize("enabled", [True, False])
def test_question_behind_the_feature_is_answered_in_the_mode_in_which_it_was_made(enabled: bool) -> None:
    model = AsksBehindTheFeature().eval()
    with torch.set_grad_enabled(enabled):
        extractor = featx.create_feature_extractor(model, ["mul"], example_inputs=torch.rand(2, 4), adaptive=False)
        x = torch.rand(3, 4)
        assert torch.equal(extractor(x)["mul"], model.layer(x))


@pytest.mark.parametrize("enabled", [True, False])
def test_question_behind_the_feature_is_answered_in_either_mode_by_a_further_graph(enabled: bool) -> None:
    model = AsksBehindTheFeature().eval()
    with torch.set_grad_enabled(enabled):
        extractor = featx.create_feature_extractor(model, ["mul"], example_inputs=torch.rand(2, 4))
    x = torch.rand(3, 4)
    with torch.set_grad_enabled(not enabled):
        assert torch.equal(extractor(x)["mul"], model.layer(x))


def test_a_trace_that_cannot_go_on_behind_the_feature_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    class ReadsValue(nn.Module):
        """Reads a value behind the feature, which a trace without values cannot."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.layer(x)
            return y * 2 if y.detach().sum().item() > 0 else y

    def fails(_: Any, trace: Any) -> Any:
        raise featx.TraceError("it cannot go on")

    dropped: list[Any] = []
    drop = ExampleTrace.drop_replica
    monkeypatch.setattr(ExampleTrace, "drop_replica", lambda trace: (dropped.append(trace), drop(trace))[1])
    monkeypatch.setattr("featx.tracing.checks.checked_trace.go_on_where_needed", fails)
    with pytest.raises(featx.TraceError, match="it cannot go on"):
        featx.create_feature_extractor(ReadsValue().eval(), ["layer"], example_inputs=X)
    assert any(trace.early_stop_reason for trace in dropped)


class SwitchesThem(nn.Module):
    """Computes a part without gradients, and where it keeps a table, as the first call does alone, or asks far away."""

    def __init__(self, *, keeps: bool, asks: bool) -> None:
        super().__init__()
        self.first, self.last, self.keeps, self.asks = nn.Linear(4, 4), nn.Linear(4, 4), keeps, asks
        self.table: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            h = self.first(x)
        if self.keeps and self.table is None:
            self.table = torch.arange(4.0)
        if self.asks and AWAY["asks"](x):
            h = h * 2
        return self.last(h) + (0 if self.table is None else self.table)


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("enabled", [True, False])
def test_where_forward_switches_gradients_it_runs_in_both_modes(enabled: bool, keeps: bool) -> None:
    model = SwitchesThem(keeps=keeps, asks=False).eval()
    with torch.set_grad_enabled(enabled):
        extractor = featx.create_feature_extractor(model, ["first", "last"], example_inputs=X, adaptive=False)
    for mode in (True, False):
        with torch.set_grad_enabled(mode):
            found = extractor(X)["last"]
            assert torch.equal(found, model.last(model.first(X)))
            assert found.requires_grad is mode


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("enabled", [True, False])
def test_where_forward_switches_them_and_asks_far_away_it_runs_in_one(enabled: bool, keeps: bool) -> None:
    model = SwitchesThem(keeps=keeps, asks=True).eval()
    with torch.set_grad_enabled(enabled):
        extractor = featx.create_feature_extractor(model, ["output"], example_inputs=X, adaptive=False)
        assert torch.equal(extractor(X)["output"], model(X))
    with torch.set_grad_enabled(not enabled), pytest.raises(featx.SpecializationError, match="grad"):
        extractor(X)
