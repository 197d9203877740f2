"""Models that have run before they are traced: caches by size leave sizes free, and all other state counts."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import featx

SIZES = ((2, 3, 16, 16), (1, 3, 16, 16), (1, 3, 24, 24), (3, 3, 8, 32))


class Anchored(nn.Module):
    """Computes its anchors where the shape of the input is another one than in the call before."""

    shape: ClassVar[Any] = None
    anchors: Any = torch.empty(0)

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.decoded(self.conv(x))

    def decoded(self, x: Tensor) -> Tensor:
        if self.shape != x.shape:
            height, width = x.shape[-2:]
            rows, columns = torch.arange(height, device=x.device), torch.arange(width, device=x.device)
            self.anchors = torch.stack(torch.meshgrid(rows + 0.5, columns + 0.5, indexing="ij"))
            self.shape = x.shape  # pyright: ignore[reportAttributeAccessIssue]
        return x + self.anchors


class AnchoredInInit(Anchored):
    def __init__(self) -> None:
        super().__init__()
        self.shape = None  # pyright: ignore[reportAttributeAccessIssue]
        self.anchors: Any = None


class AnchoredByDevice(AnchoredInInit):
    def decoded(self, x: Tensor) -> Tensor:
        key: Any = (x.shape[2], x.shape[3], x.device, x.dtype)
        if self.shape != key:
            self.shape, self.anchors = key, torch.arange(key[0] * key[1], device=x.device).reshape(key[:2]) + 0.5
        return x + self.anchors


class AnchoredInADict(AnchoredInInit):
    def __init__(self) -> None:
        super().__init__()
        self.tables = {}

    def decoded(self, x: Tensor) -> Tensor:
        key: Any = (x.shape[2], x.shape[3])
        if key not in self.tables:
            self.tables[key] = torch.arange(key[0] * key[1], device=x.device).reshape(key) + 0.5
        return x + self.tables[key]


def test_entry_of_a_dict_that_somebody_has_set_is_kept() -> None:
    model = AnchoredInADict().eval()
    model.tables[6, 6] = torch.zeros(6, 6)  # pyright: ignore[reportUnknownMemberType]
    x = torch.rand(2, 3, 4, 4)
    model(x)
    extractor = featx.create_feature_extractor(model, ["output"], example_inputs=x)
    for side in (4, 6, 8):
        x = torch.rand(2, 3, side, side)
        with contextlib.suppress(featx.SpecializationError):
            assert torch.equal(extractor(x)["output"], model(x))


@pytest.mark.slow
@pytest.mark.parametrize("names", [["conv", "output"], ["output"]])
@pytest.mark.parametrize(
    ("build", "before"),
    [
        *itertools.product([Anchored, AnchoredInInit, AnchoredByDevice], SIZES),
        # With an entry for another size than that of the example, it is one that somebody may have set.
        *itertools.product([AnchoredInADict], SIZES[:2]),
    ],
)
def test_sizes_of_a_model_that_has_run_are_as_free_as_those_of_one_that_has_not(
    build: Callable[[], nn.Module], before: tuple[int, ...], names: list[str]
) -> None:
    torch.manual_seed(0)
    fresh = build().eval()
    model = copy.deepcopy(fresh)
    model(torch.rand(before))
    state = dict(vars(model))
    example = torch.rand(SIZES[0])
    expected = featx.create_feature_extractor(fresh, names, example_inputs=example).free_dims
    extractor = featx.create_feature_extractor(model, names, example_inputs=example)
    assert str(extractor.free_dims) == str(expected)
    assert all(vars(model)[name] is value for name, value in state.items())
    reference = copy.deepcopy(model)
    for size in SIZES:
        x = torch.rand(size)
        assert torch.equal(extractor(x)["output"], reference(x))


class KeepsInput(nn.Module):
    """Adds what it has computed in its first call."""

    memory: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.memory is None:
            self.memory = y.detach().mean(0)
        return y + self.memory


class KeepsInputOfInit(KeepsInput):
    def __init__(self) -> None:
        super().__init__()
        self.memory = None


class KeepsWeights(KeepsInput):
    def forward(self, x: Tensor) -> Tensor:
        if self.memory is None:
            self.memory = self.linear.weight.detach().sum(0)
        return self.linear(x) + self.memory


class KeepsTable(KeepsInput):
    """Has a table of the length of its first call."""

    def forward(self, x: Tensor) -> Tensor:
        if self.memory is None:
            self.memory = torch.arange(x.shape[0])[:, None]
        return self.linear(x) + self.memory


class KeepsMask(KeepsInput):
    def forward(self, x: Tensor) -> Tensor:
        if self.memory is None:
            self.memory = (x > 0.5).any(0)
        return self.linear(x) * self.memory


@pytest.mark.slow
@pytest.mark.parametrize("build", [KeepsInput, KeepsInputOfInit, KeepsWeights, KeepsTable, KeepsMask])
@pytest.mark.parametrize("length", [None, 3, 5])
def test_what_the_model_has_kept_otherwise_is_what_its_graph_has(
    build: Callable[[], nn.Module], length: int | None
) -> None:
    torch.manual_seed(0)
    model, example = build().eval(), torch.rand(3, 4)
    model(example if length is None else torch.rand(length, 4))
    if build is KeepsTable and length == 5:
        with pytest.raises(RuntimeError):
            model(example)
        return
    reference = copy.deepcopy(model)
    extractor = featx.create_feature_extractor(model, ["linear", "output"], example_inputs=example)
    with torch.no_grad():
        for module in (model, reference):
            module.get_parameter("linear.weight").mul_(2)
        for x in (example, torch.rand(3, 4), torch.rand(5, 4)):
            try:
                found = extractor(x)["output"]
            except featx.SpecializationError:
                assert x.shape != example.shape
                continue
            assert torch.equal(found, reference(x))


class ChoosesItself(KeepsInput):
    """Chooses for itself what nobody has chosen, which matters in train mode alone."""

    def __init__(self) -> None:
        super().__init__()
        self.choice: str | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.choice is None:
            self.choice = "once"
        x = self.linear(x)
        return x * 3 if self.training and self.choice == "thrice" else x


def test_what_somebody_has_set_is_no_cache() -> None:
    torch.manual_seed(0)
    model, x = ChoosesItself(), torch.rand(3, 4)
    model.choice = "thrice"
    extractor = featx.create_feature_extractor(
        model, ["linear", "output"], example_inputs=x, suppress_diff_warning=True
    )
    assert torch.equal(extractor(x)["output"], copy.deepcopy(model)(x))


class FilledInEvalMode(KeepsInput):
    """Has a number of the size of the last input in eval mode, which it reads in train mode."""

    shift: float = 0.0

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            self.shift = x.shape[0] * 0.5
        return self.linear(x) + self.shift


@pytest.mark.parametrize("training", [False, True])
def test_what_one_mode_reads_of_the_other(training: bool) -> None:
    torch.manual_seed(0)
    model, x = FilledInEvalMode().eval(), torch.rand(3, 4)
    model(torch.rand(5, 4))
    reference = copy.deepcopy(model).train(training)
    extractor = featx.create_feature_extractor(
        model.train(training), ["linear", "output"], example_inputs=x, suppress_diff_warning=True
    )
    assert torch.equal(extractor(x)["output"], reference(x))
    with pytest.raises(featx.TraceError):
        extractor.train(not training)(x)


class ArrayOfLength(nn.Module):
    """Keeps an array of numpy for the length that it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.grid: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if self.grid is None or len(self.grid) != x.shape[1]:
            self.grid = np.arange(x.shape[1])
        return x * 2


def test_an_array_that_an_earlier_call_has_left_is_no_error() -> None:
    model, x = ArrayOfLength().eval(), torch.rand(2, 3)
    model(x)
    assert torch.equal(featx.trace(model, x)(x), model(x))
