"""The harness itself: it finds nothing in the model as its own trace, and finds tracers that are wrong on purpose."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import grammar
import pytest
import torch
from comparison import Library, Verdict, judge
from inputs import Case
from programs import Program
from tally import Tally
from torch import nn
from torch.overrides import TorchFunctionMode, resolve_name

import featx

pytestmark = pytest.mark.fuzzing

SIZES = ("shape.__get__", "Tensor.size", "Tensor.__len__", "Tensor.numel")
VALUES = ("Tensor.__bool__", "Tensor.item", "Tensor.tolist", "Tensor.__float__", "Tensor.__int__")
DRAWS = ("dropout", "rand", "normal_", "bernoulli", "uniform_")


def name_of(function: Any) -> str:
    return resolve_name(function) or str(getattr(function, "__name__", function))


class Recorded(nn.Module):
    """Answers questions of a kind as they were answered while an example ran."""

    def __init__(self, model: nn.Module, names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.answers: list[Any] = []
        self.names = names
        with Ask(self, record=True), torch.random.fork_rng():
            copy.deepcopy(model)(*copy.deepcopy(args), **copy.deepcopy(kwargs))
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with Ask(self, record=False):
            return self.model(*args, **kwargs)


class Ask(TorchFunctionMode):
    def __init__(self, owner: Recorded, record: bool) -> None:
        super().__init__()
        self.owner, self.record, self.place = owner, record, 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not any(name in name_of(function) for name in self.owner.names):
            return function(*args, **(kwargs or {}))
        if self.record:
            self.owner.answers.append(copy.deepcopy(function(*args, **(kwargs or {}))))
            return self.owner.answers[-1]
        if self.place >= len(self.owner.answers):
            return function(*args, **(kwargs or {}))
        self.place += 1
        return copy.deepcopy(self.owner.answers[self.place - 1])


class WithoutWrites(nn.Module):
    """Lets calls that write do so in copies."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with Elsewhere():
            return self.model(*args, **kwargs)


class Elsewhere(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = name_of(function)
        writes = (name.endswith("_") and not name.endswith("__")) or name.endswith(("__setitem__", "__iadd__"))
        if writes and isinstance(args[0], torch.Tensor):
            args = (args[0].clone(), *args[1:])
        return function(*args, **(kwargs or {}))


class Scaled(nn.Module):
    """Right in all but the last bits of the result."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        result = self.model(*args, **kwargs)
        return result * (1 + 1e-6) if isinstance(result, torch.Tensor) and result.is_floating_point() else result


def run_on_model(model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    model(*copy.deepcopy(args), **copy.deepcopy(kwargs))
    return model


WRONG: dict[str, Callable[..., nn.Module]] = {
    "sizes of the example": lambda model, *args, **kwargs: Recorded(model, SIZES, args, kwargs),
    "values of the example": lambda model, *args, **kwargs: Recorded(model, VALUES, args, kwargs),
    "draws of the example": lambda model, *args, **kwargs: Recorded(model, DRAWS, args, kwargs),
    "no writes": lambda model, *args, **kwargs: WithoutWrites(model),
    "a copy of the model": lambda model, *args, **kwargs: copy.deepcopy(model),
    "last bits": lambda model, *args, **kwargs: Scaled(model),
    "a run of the model itself": run_on_model,
}


def verdicts(trace: Callable[..., nn.Module], count: int) -> list[Verdict]:
    choices = random.Random(0)
    library = Library(trace, featx.FeatxError)
    return [judge(grammar.draw(choices.randrange).case, library) for _ in range(count)]


def test_model_in_place_of_its_trace_has_no_finding() -> None:
    tally = Tally()
    for verdict in verdicts(lambda model, *args, **kwargs: model, 60):
        assert not verdict.findings, str(verdict)
        tally.add(verdict)
    assert tally.share("compared at another size") > 0.9
    assert tally.cases["the model itself raises"] < 10


@pytest.mark.parametrize("name", WRONG)
def test_wrong_tracer_is_found(name: str) -> None:
    found = sum(bool(verdict.findings) for verdict in verdicts(WRONG[name], 30))
    assert found >= 2


@pytest.mark.parametrize("error", [featx.TraceError("no"), KeyError("no")])
def test_error_at_the_trace_is_a_finding_unless_it_is_ours(error: Exception) -> None:
    def trace(model: nn.Module, *args: Any) -> nn.Module:
        raise error

    verdict = judge(Case(Program(()).case.source), Library(trace, featx.FeatxError))
    assert bool(verdict.findings) == isinstance(error, KeyError)
    assert bool(verdict.refusals) == isinstance(error, featx.TraceError)


def test_program_of_first_choices_returns_its_input() -> None:
    assert "return x" in grammar.draw(lambda limit: 0).case.source


def test_extractor_of_torchvision_is_found() -> None:
    theirs = pytest.importorskip("torchvision.models.feature_extraction")

    def refuse(model: nn.Module, *args: Any) -> nn.Module:
        raise featx.TraceError("only its extractors")

    def extractor(model: nn.Module, example_inputs: Any, **options: Any) -> nn.Module:
        return theirs.create_feature_extractor(model, **options)

    def names(model: nn.Module, example_inputs: Any) -> tuple[list[str], list[str]]:
        return theirs.get_graph_node_names(model)

    library = Library(refuse, Exception, extractor, names)
    found = [judge(grammar.draw(random.Random(seed).randrange).case, library).findings for seed in range(200)]
    assert any(kind == "wrong feature" for findings in found for kind, _, _ in findings)
