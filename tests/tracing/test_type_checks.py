"""Functions whose arguments beartype checks: it draws from Python's generator which item of a list it looks at."""

from __future__ import annotations

import inspect
import random
import sys

import pytest
import torch
from beartype import BeartypeConf, BeartypeStrategy, beartype
from torch import Tensor, nn

import featx


@beartype
def add(parts: list[Tensor]) -> Tensor:
    return torch.stack(parts).sum(0)


class Adds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return add([self.layer(x), x]) * x.shape[0]


class ChecksItself(Adds):
    @beartype
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class OfParts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList([Adds(), ChecksItself()])

    def forward(self, x: Tensor) -> Tensor:
        return self.join([each(x) for each in self.inner])

    @beartype
    def join(self, parts: list[Tensor]) -> Tensor:
        return torch.cat(parts)


@pytest.mark.parametrize("kind", [Adds, ChecksItself, OfParts])
def test_draws_of_type_checks_are_no_part_of_the_graph(kind: type[nn.Module]) -> None:
    model = kind().eval()
    random.seed(3)
    before = random.getstate()
    extractor = featx.create_feature_extractor(model, ["output"], example_inputs=torch.rand(2, 4), adaptive=False)
    assert random.getstate() == before
    for rows in (2, 1, 5):
        x = torch.rand(rows, 4)
        assert torch.equal(extractor(x)["output"], model(x))


def test_module_with_type_checks_that_is_kept_whole_is_right() -> None:
    model = nn.Sequential(OfParts(), nn.Linear(4, 2)).eval()
    random.seed(3)
    before = random.getstate()
    extractor = featx.create_feature_extractor(model, ["1"], example_inputs=torch.rand(2, 4))
    assert random.getstate() == before
    x = torch.rand(3, 4)
    assert torch.equal(extractor(x)["1"], model(x))


class DrawsAsWell(Adds):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * vars(random)["random"]()


def test_draws_of_the_model_beside_them_are_refused() -> None:
    with pytest.raises(featx.TraceError, match="draws from a random generator of Python or numpy"):
        featx.create_feature_extractor(DrawsAsWell(), ["output"], example_inputs=torch.rand(2, 4))


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * random.random()


def test_draws_of_a_module_that_is_kept_whole_beside_them_are_refused() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.adds, self.noise, self.last = Adds(), Noise(), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.noise(add([x, x])))

    with pytest.raises(featx.TraceError, match="kept whole draws from a random generator of Python, from which type"):
        featx.create_feature_extractor(Noisy(), ["output"], example_inputs=torch.rand(2, 4))


def test_beside_a_profiler_they_are_refused_with_advice() -> None:
    sys.setprofile(lambda frame, event, called: None)
    try:
        with pytest.raises(featx.TraceError, match=r"if beartype draws .*BeartypeStrategy.O0"):
            featx.create_feature_extractor(Adds(), ["output"], example_inputs=torch.rand(2, 4))
    finally:
        sys.setprofile(None)


def test_the_advice_does() -> None:
    class Unchecked(Adds):
        def forward(self, x: Tensor) -> Tensor:
            return unchecked([self.layer(x), x])

    unchecked = beartype(conf=BeartypeConf(strategy=BeartypeStrategy.O0))(inspect.unwrap(add))
    x, model = torch.rand(2, 4), Unchecked()
    extractor = featx.create_feature_extractor(model, ["output"], example_inputs=x)
    assert torch.equal(extractor(x)["output"], model(x))
