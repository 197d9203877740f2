"""Errors that the model catches: the signals of a trace, and errors of calls that other inputs may not cause."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
from torch import nn

import featx


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Identity(), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.of(self.a(x)))

    def of(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


def fails_for_two(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(3, -1, 4).flip(0).reshape(-1, 4)


class BareExcept(Net):
    def of(self, x: torch.Tensor) -> torch.Tensor:
        try:
            return fails_for_two(x)
        except:  # noqa: E722 - as research code has it
            return x


class BareExceptAroundItem(Net):
    def of(self, x: torch.Tensor) -> torch.Tensor:
        try:
            return x * x.max().item()
        except:  # noqa: E722
            return x


class BaseExceptionAroundAModule(Net):
    def of(self, x: torch.Tensor) -> torch.Tensor:
        try:
            return self.a(x) * self.a(x).max()
        except BaseException:
            return x


class ReturnInFinally(Net):
    def of(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        try:
            y = x * int(x.argmax())
        finally:
            return y  # noqa: B012


class OtherErrorInItsPlace(Net):
    def of(self, x: torch.Tensor) -> torch.Tensor:
        with contextlib.suppress(ValueError):
            try:
                x = x * 2
            except:  # noqa: E722
                raise ValueError("no") from None
        return x


class Quiet:
    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> bool:
        return kind is RuntimeError


class ExitThatCatches(Net):
    def of(self, x: torch.Tensor) -> torch.Tensor:
        with Quiet():
            return fails_for_two(x)
        return x


@contextlib.contextmanager
def quiet() -> Generator[None]:
    with contextlib.suppress(RuntimeError):
        yield


class ContextManager(Net):
    def of(self, x: torch.Tensor) -> torch.Tensor:
        with quiet():
            return fails_for_two(x)
        return x


def with_fallback(of: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(of)
    def call(*args: Any) -> torch.Tensor:
        try:
            return of(*args)
        except RuntimeError:
            return args[1]

    return call


class Decorator(Net):
    @with_fallback
    def of(self, x: torch.Tensor) -> torch.Tensor:
        return fails_for_two(x)


class DecoratorAroundAModule(Net):
    @with_fallback
    def of(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(x[:, :3])


MODELS = [
    BareExcept, BareExceptAroundItem, BaseExceptionAroundAModule, ReturnInFinally, OtherErrorInItsPlace,
    ExitThatCatches, ContextManager, Decorator, DecoratorAroundAModule,
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("names", [["output"], ["b"], ["a", "b"]], ids=" ".join)
@pytest.mark.parametrize("kind", MODELS)
def test_extractor_is_right_or_refused(kind: type[Net], names: list[str]) -> None:
    model, example = kind().eval(), torch.rand(2, 4)
    want = model(example)
    try:
        extractor = featx.create_feature_extractor(model, names, example_inputs=example)
    except featx.TraceError:
        return
    assert torch.equal(extractor(example)[names[-1]], want)
    for length in (3, 4):
        x = torch.rand(length, 4)
        with contextlib.suppress(featx.SpecializationError):
            assert torch.equal(extractor(x)[names[-1]], model(x))


@pytest.mark.parametrize("kind", [kind for kind in MODELS if kind is not ReturnInFinally])  # of that all is recorded
def test_module_that_catches_is_kept_whole(kind: type[Net]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), kind(), nn.ReLU()).eval()
    graph_module = featx.trace(model, torch.rand(2, 4))
    assert "1" in {node.target for node in graph_module.graph.find_nodes(op="call_module")}
    for length in (2, 3, 4):
        x = torch.rand(length, 4)
        with contextlib.suppress(featx.SpecializationError):
            assert torch.equal(graph_module(x), model(x))


def test_error_that_ends_forward_is_the_models_own() -> None:
    class Fails(Net):
        def of(self, x: torch.Tensor) -> torch.Tensor:
            try:
                return self.b(x[:, :3])
            finally:
                torch.zeros(2).add(1)  # what is called while the error passes is not in its way

    with pytest.raises(Exception, match="mat1 and mat2 shapes"):
        featx.trace(Fails(), torch.rand(2, 4))


class Divides(Net):
    def of(self, x: torch.Tensor) -> torch.Tensor:
        n = (x > 0).sum().item()
        try:
            scale = 1 / n
        except ZeroDivisionError:
            scale = -1.0
        return x * scale


class TakesLogarithm(Net):
    def of(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.mean().item()
        try:
            scale = math.log(mean)
        except ValueError:
            scale = -1.0
        return x * scale


class TakesLogarithmOfLength(Net):
    def of(self, x: torch.Tensor) -> torch.Tensor:
        try:
            scale = math.log(x.shape[0] - 2)
        except ValueError:
            scale = -1.0
        return x * scale


class Overflows(Net):
    def of(self, x: torch.Tensor) -> torch.Tensor:
        total = x.sum().item() * 1000
        try:
            scale = math.exp(total)
        except OverflowError:
            scale = 7.0
        return x * scale


class DividesWhereSuppressed(Net):
    def of(self, x: torch.Tensor) -> torch.Tensor:
        scale = -1.0
        with contextlib.suppress(ZeroDivisionError):
            scale = 1 / (x.shape[0] - 3)
        return x * scale


INPUTS = [torch.rand(2, 4) + 0.1, -torch.rand(2, 4) - 0.1, torch.zeros(2, 4), torch.rand(3, 4), torch.rand(5, 4)]


@pytest.mark.parametrize("example", range(len(INPUTS)))
@pytest.mark.parametrize("kind", [Divides, TakesLogarithm, TakesLogarithmOfLength, Overflows, DividesWhereSuppressed])
def test_number_that_an_error_comes_from_is_checked(kind: type[Net], example: int) -> None:
    model = kind().eval()
    extractor = featx.create_feature_extractor(model, ["b"], example_inputs=INPUTS[example])
    assert torch.equal(extractor(INPUTS[example])["b"], model(INPUTS[example]))
    for x in INPUTS:
        # ValueError, OverflowError: math says so, where the model would catch it.
        with contextlib.suppress(featx.SpecializationError, ValueError, OverflowError):
            assert torch.equal(extractor(x)["b"], model(x))


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * lengths[:, None]


class TriesSignatures(nn.Module):
    """Gives lengths to the layers that take them, as SpeechBrain does."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Weighted(), nn.ReLU(), Weighted(), nn.BatchNorm1d(4)])

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        for layer in self.blocks:
            try:
                x = layer(x, lengths=lengths)
            except TypeError:
                x = layer(x)
        return x


@pytest.mark.parametrize("names", [["blocks.1", "blocks.3"], ["blocks.2.layer", "blocks.3"]], ids=" ".join)
def test_arguments_that_a_module_does_not_have_are_refused_for_all_inputs(names: list[str]) -> None:
    model = TriesSignatures().eval()
    found: dict[str, torch.Tensor] = {}
    for name in names:
        model.get_submodule(name).register_forward_hook(functools.partial(note_output, found, name))
    extractor = featx.create_feature_extractor(model, names, example_inputs=(torch.rand(3, 4), torch.rand(3)))
    inputs = torch.rand(5, 4), torch.rand(5)
    model(*inputs)
    torch.testing.assert_close(extractor(*inputs), found, rtol=0, atol=0)


def note_output(found: dict[str, torch.Tensor], name: str, module: nn.Module, args: Any, output: torch.Tensor) -> None:
    found[name] = output


class FailsInside(nn.Module):
    def forward(self, x: torch.Tensor, lengths: torch.Tensor | None = None) -> torch.Tensor:
        if lengths is not None and lengths.max() > 0:
            raise TypeError("too long")
        return x


def test_a_type_error_from_inside_of_a_call_is_no_matter_of_its_arguments() -> None:
    model = TriesSignatures()
    model.blocks.insert(1, FailsInside())
    with pytest.raises(featx.TraceError, match="catches the error of a call"):
        featx.create_feature_extractor(model, ["blocks.3"], example_inputs=(torch.rand(3, 4), torch.rand(3)))
