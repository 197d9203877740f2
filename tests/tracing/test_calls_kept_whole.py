"""What a module that is kept whole returns and writes: its rank, its numbers, views of its state, shared state."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import featx


class Squeezes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x).mean((2, 3), keepdim=True).squeeze()


class AsksForRank(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = Squeezes(), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        return self.head(y.unsqueeze(0) if y.dim() == 1 else y)


class Routes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        return x.tanh(), int(self.gate(x.mean(0)).argmax())


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.experts = Routes(), nn.ModuleList([nn.Linear(8, 4) for _ in range(3)])
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, chosen = self.inner(x)
        return self.head(self.experts[chosen](y))


class Queue(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(6, 8))

    def forward(self, y: torch.Tensor) -> None:
        self.rows[: y.shape[0]].copy_(y)


class Remembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.queue, self.head = nn.Linear(8, 8), Queue(), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        out = self.head(y @ self.queue.rows.t())
        self.queue(y)
        return out


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * x.mean(0))
        return x - self.mean


class WithNorm(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.linear = norm, nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.norm(x))


class SharedNorm(nn.Module):
    """Two modules that are kept whole share one that keeps statistics."""

    def __init__(self) -> None:
        super().__init__()
        norm = Norm()
        self.head, self.critic = WithNorm(norm), WithNorm(norm)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.head(x), self.critic(x)


class ScalesRows(nn.Module):
    """Reads the weight of an embedding before the layer scales rows of it down, in eval mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(6, 4, max_norm=1.0), nn.Linear(4, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = self.head(self.embedding.weight)
        return self.embedding(ids) @ rows.t()


class Case(NamedTuple):
    make: Callable[[], nn.Module]
    inputs: list[torch.Tensor]
    training: bool = False
    is_refused: bool = False


def random(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) * 3 for shape in shapes]


CASES: dict[str, Case] = {
    "rank": Case(AsksForRank, random((3, 3, 8, 8), (1, 3, 8, 8), (4, 3, 8, 8)), is_refused=True),
    "rank of one": Case(AsksForRank, random((1, 3, 8, 8), (3, 3, 8, 8)), is_refused=True),
    "number": Case(Experts, random(*[(4, 8)] * 8), is_refused=True),
    "view": Case(Remembers, random(*[(2, 8)] * 3)),
    "shared": Case(SharedNorm, random(*[(2, 8)] * 3), training=True),
    "max_norm": Case(ScalesRows, [torch.tensor([[1, 2]]), torch.tensor([[3, 2]]), torch.tensor([[1, 2]])]),
}


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_values_are_those_of_the_model(name: str, adaptive: bool) -> None:
    torch.manual_seed(0)
    case = CASES[name]
    model = case.make().train(case.training)
    eager = copy.deepcopy(model)
    seen: list[torch.Tensor] = []
    eager.get_submodule("head").register_forward_hook(lambda module, args, output: seen.append(output.detach().clone()))
    extractor = featx.create_feature_extractor(
        model, ["head"], example_inputs=case.inputs[0], adaptive=adaptive, suppress_diff_warning=True
    )
    refused = 0
    for x in case.inputs:
        eager(x)
        try:
            found: Any = extractor(x)["head"]
        except featx.SpecializationError:
            refused += 1
            continue
        assert found.shape == seen[-1].shape
        assert torch.equal(found, seen[-1])
    assert (refused > 0) is (case.is_refused and not adaptive)
