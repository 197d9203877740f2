"""Caches that forward fills in eval mode alone, and what they fix in each mode."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional

import featx

X = torch.rand(3, 4, generator=torch.Generator().manual_seed(0)) - 0.5


class KeepsTable(nn.Module):
    """Has a table of the length of the first call in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        if self.training:
            return x * 2
        if self.table is None:
            self.table = torch.arange(x.shape[0])[:, None]
        return x + self.table


def test_a_cache_of_one_length_in_eval_mode_leaves_train_mode_as_it_is() -> None:
    torch.manual_seed(0)
    model = KeepsTable().eval()
    reference = copy.deepcopy(model)
    extractor = featx.create_feature_extractor(
        model, ["linear", "output"], example_inputs=X, suppress_diff_warning=True
    )
    assert torch.equal(extractor(X)["output"], reference(X))
    assert torch.equal(extractor.train()(X[:2])["output"], reference.train()(X[:2]))


class KeepsBias(nn.Module):
    """Normalizes by a function, and keeps a bias that no size has to do with."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = Norm(4)
        self.bias = nn.Parameter(torch.rand(8))
        self.kept: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return self.norm(x) + self.bias[::2]
        if "bias" not in self.kept:
            self.kept["bias"] = self.bias[::2]
        return self.norm(x) + self.kept["bias"]


class Norm(nn.BatchNorm1d):
    def forward(self, input: Tensor) -> Tensor:
        mean, variance = self.running_mean, self.running_var
        return functional.batch_norm(input, mean, variance, self.weight, self.bias, self.training, self.momentum or 0.1)


def test_normalization_that_only_reads_its_statistics_leaves_the_batch_free() -> None:
    torch.manual_seed(0)
    model = KeepsBias().eval()
    reference = copy.deepcopy(model)
    extractor = featx.create_feature_extractor(model, ["norm", "output"], example_inputs=X, suppress_diff_warning=True)
    with torch.no_grad():
        for x in (X, X[:2], torch.cat([X, X])):
            assert torch.equal(extractor(x)["output"], reference(x))
