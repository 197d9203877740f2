"""A requested value that a module which is kept whole overwrites for some inputs, and not on the example."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

import featx
from featx.ir.apart import later_of, returned_of
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


class MayReturnOrWrite(nn.Module):
    """Returns its second input for some inputs, and writes the first one for others. On the example it does neither."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        if x.max() > 10:
            return other[0]
        if x.min() < -10:
            x.mul_(2.0)
        return self.linear(x)


class SharesAnInput(nn.Module):
    """Gives each of its blocks the same second input, as transformers give theirs masks and positions."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.blocks = nn.Linear(4, 4), nn.ModuleList(MayReturnOrWrite() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        other = (self.start(x) * 0.1).unsqueeze(0)
        for block in self.blocks:
            x = block(x, other)
        return x


def test_gradients_reach_a_value_beside_an_input_that_several_blocks_share() -> None:
    model = SharesAnInput().eval()
    expected: list[torch.Tensor] = []
    reference = copy.deepcopy(model)
    reference.blocks[1].register_forward_hook(lambda module, args, output: expected.append(output))
    extractor = featx.create_feature_extractor(model, ["blocks.1", "blocks.2"], example_inputs=torch.rand(2, 4))
    x = torch.rand(3, 4)
    found = extractor(x)
    (gradient,) = torch.autograd.grad(found["blocks.2"].sin().sum(), found["blocks.1"])
    (wanted,) = torch.autograd.grad(reference(x).sin().sum(), expected[0])
    assert torch.equal(gradient, wanted)
    assert torch.equal(found["blocks.1"], expected[0])


@pytest.mark.parametrize("names", [["blocks.0", "blocks.2"], ["blocks.0", "blocks.0.linear", "blocks.2"]])
def test_a_value_that_shares_memory_with_such_an_input_is_as_it_was(names: list[str]) -> None:
    model = SharesAnInput().eval()
    extractor = featx.create_feature_extractor(model, names, example_inputs=torch.rand(2, 4))
    for x in (torch.rand(2, 4), torch.full((2, 4), 20.0), -20 * torch.ones(2, 4)):
        expected: list[torch.Tensor] = []
        reference = copy.deepcopy(model)
        reference.blocks[0].register_forward_hook(lambda _, __, output, seen=expected: seen.append(output.clone()))
        result = reference(x.clone())
        try:
            found = extractor(x.clone())
        except featx.SpecializationError:  # where the block is looked into
            assert len(names) == 3
            continue
        assert torch.equal(found["blocks.0"], expected[0])
        assert torch.equal(found["blocks.2"], result)


def test_what_later_code_gets_can_be_compiled_and_scripted() -> None:
    def doubled(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x * 2
        later = later_of(y, [x])
        returned = returned_of(y, later)
        return returned, later.mul_(3)

    x = torch.rand(2, 4)
    for function in (doubled, torch.compile(doubled, backend="eager", fullgraph=True), torch.jit.script(doubled)):
        returned, later = function(x)
        assert torch.equal(returned, x * 2)
        assert torch.equal(later, x * 2 * 3)


def test_what_shares_memory_goes_on_as_it_is() -> None:
    x = torch.rand(2, 4)
    assert later_of(x, [x[1:]]) is x
    assert returned_of(x, x) is not x
    assert later_of(x, [x + 1]) is not x
