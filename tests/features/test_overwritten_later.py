"""A requested value that a module which is kept whole overwrites for some inputs, and not on the example."""

from __future__ import annotations

import operator
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

import featx
from featx.tracing.guards.versions import check_version, version_of

Write = Callable[[torch.Tensor, bool], torch.Tensor]
X = torch.rand(2, 6)


def clip(x: torch.Tensor, is_large: bool) -> torch.Tensor:
    return x.clamp_(-1, 1) if is_large else x


def by_method(x: torch.Tensor, is_large: bool) -> torch.Tensor:
    return (x.mul_ if is_large else x.mul)(2)


def by_argument(x: torch.Tensor, is_large: bool) -> torch.Tensor:
    return functional.relu(x, is_large)


def by_operator(x: torch.Tensor, is_large: bool) -> torch.Tensor:
    return (operator.imul if is_large else operator.mul)(x, 2)


def by_foreach(x: torch.Tensor, is_large: bool) -> torch.Tensor:
    if is_large:
        torch._foreach_mul_([x], 2)
    return x * 1


def by_item(x: torch.Tensor, is_large: bool) -> torch.Tensor:
    y = x if is_large else x.clone()
    y[:, 0] = 7
    return y


class Child(nn.Module):
    def __init__(self, writes: list[Write]) -> None:
        super().__init__()
        self.writes = writes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.writes[0](x, bool(x.abs().max() > 5)) + 1


class Model(nn.Module):
    def __init__(self, write: Write) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.child = Child([write])
        self.last = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.child(self.first(x)))


WRITES = [clip, by_method, by_argument, by_operator, by_foreach, by_item]


@pytest.mark.parametrize("write", WRITES)
def test_write_into_a_returned_value_is_noticed(write: Write) -> None:
    model = Model(write).eval()
    extractor = featx.create_feature_extractor(model, ["first", "last"], example_inputs=X)
    with torch.no_grad():
        got = extractor(X)
        assert torch.equal(got["first"], model.first(X))
        assert torch.equal(got["last"], model(X))
        with pytest.raises(featx.MutationError, match="'first' was written in place by 'child'"):
            extractor(100 * X)


@pytest.mark.parametrize("write", WRITES)
def test_adaptive_extractor_makes_a_graph_that_writes(write: Write) -> None:
    model = Model(write).eval()
    extractor = featx.create_feature_extractor(model, ["first", "last"], example_inputs=X, adaptive=True)
    with torch.no_grad():
        for x in (X, 100 * X, X):
            got = extractor(x)
            assert torch.equal(got["first"], model.first(x))
            assert torch.equal(got["last"], model(x))


def test_value_that_is_not_returned_may_be_written() -> None:
    model = Model(clip).eval()
    extractor = featx.create_feature_extractor(model, ["last"], example_inputs=X)
    with torch.no_grad():
        assert torch.equal(extractor(100 * X)["last"], model(100 * X))


def test_names_inside_and_an_example_that_is_written_help() -> None:
    model = Model(clip).eval()
    with torch.no_grad():
        extractor = featx.create_feature_extractor(model, ["first", "last"], example_inputs=100 * X)
        got = extractor(100 * X)
        assert torch.equal(got["first"], model.first(100 * X))
        assert torch.equal(got["last"], model(100 * X))


@pytest.mark.slow
def test_versions_do_not_stand_in_the_way_of_compilers(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), Plain()), nn.Linear(6, 6)).eval()
    extractor = featx.create_feature_extractor(model, ["0", "2"], example_inputs=X)
    assert "check_version" in extractor.code
    expected = extractor(X)
    compiled = torch.compile(extractor, backend="eager", fullgraph=True)
    exported = torch.export.export(extractor, (X,), strict=True).module()
    with torch.inference_mode():
        in_inference_mode = extractor(X)
    for got in (compiled(X), exported(X), torch.jit.script(extractor)(X), in_inference_mode):
        assert torch.equal(got["2"], expected["2"])


def test_versions_that_were_not_counted_are_not_compared() -> None:
    written = torch.zeros(2).add_(1)
    with torch.inference_mode():
        uncounted = torch.zeros(2)
    assert [version_of(value) for value in (written, (written, written), uncounted, (written, uncounted))] == [
        1,
        2,
        -1,
        -1,
    ]
    check_version(written, -1, "a value that compiled code has made")
    check_version(uncounted, 0, "a value of inference mode")
    with pytest.raises(featx.MutationError):
        check_version(written, 0, "a value")


class Plain(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2
