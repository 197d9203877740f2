"""Features that share memory with what lives on after their call, or that is written where no argument leads."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import featx

BATCHES = [torch.rand(3, 4, generator=torch.Generator().manual_seed(seed)) * seed for seed in (1, 5, 9)]


class Center(nn.Module):
    """Returns a running mean that it keeps in a buffer."""

    center: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.center.lerp_(x.detach().mean(0), 0.5)
        return self.center


class Centered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.center, self.last = nn.Linear(4, 4), Center(), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.last(x - self.center(x))


@pytest.mark.parametrize(
    "names", [["center"], ["center.lerp_"], ["center", "output"], ["center", "last"]], ids=" ".join
)
def test_buffer_that_each_call_writes_is_returned_as_it_was(names: list[str]) -> None:
    model = Centered().eval()
    expected: list[torch.Tensor] = []
    twin = copy.deepcopy(model)
    twin.center.register_forward_hook(lambda module, args, output: expected.append(output.clone()))
    for batch in BATCHES:
        twin(batch)
    extractor = featx.create_feature_extractor(model, names, example_inputs=BATCHES[0])
    found = [extractor(batch)[names[0]] for batch in BATCHES]
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_buffer_that_no_call_writes_is_returned_itself() -> None:
    class Returning(nn.Module):
        table: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("table", torch.ones(4))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.linear(x), self.table

    model = Returning()
    extractor = featx.create_feature_extractor(model, ["output"], example_inputs=BATCHES[0])
    assert extractor(BATCHES[0])["output"][1] is model.table


class Store(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kept: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = x
        return x


class WritesWhatIsStored(nn.Module):
    def __init__(self, store: Store) -> None:
        super().__init__()
        self.store = [store]  # no submodule

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.store[0].kept.add_(1)
        return x * 2


class ThroughAModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.store = nn.Linear(4, 4), Store()
        self.later, self.decoder = WritesWhatIsStored(self.store), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.encoder(x)
        self.store(y)
        return self.decoder(self.later(x)) + y.sum()


class Skipping(nn.Module):
    def __init__(self, skips: list[torch.Tensor], is_last: bool) -> None:
        super().__init__()
        self.skips, self.linear, self.is_last = skips, nn.Linear(4, 4), is_last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        if not self.is_last:
            self.skips.append(x)
            return x
        skip = self.skips.pop()
        skip += x
        return skip.relu()


class ThroughAList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        skips: list[torch.Tensor] = []
        self.encoder, self.middle, self.decoder = Skipping(skips, False), nn.Linear(4, 4), Skipping(skips, True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.middle(self.encoder(x)))


@pytest.mark.parametrize("names", [["encoder"], ["encoder", "output"], ["encoder", "decoder"]], ids=" ".join)
@pytest.mark.parametrize("kind", [ThroughAModule, ThroughAList])
def test_value_that_is_written_where_no_argument_leads_is_what_it_was(kind: type[nn.Module], names: list[str]) -> None:
    model = kind().eval()
    twin, expected = copy.deepcopy(model), dict[str, torch.Tensor]()
    for name, module in twin.named_modules():
        module.register_forward_hook(
            lambda module, args, output, name=name: expected.__setitem__(name or "output", output.clone())
        )
    with torch.no_grad():
        extractor = featx.create_feature_extractor(model, names, example_inputs=BATCHES[0])
        for batch in BATCHES:
            found = extractor(batch)
            twin(batch)
            assert all(torch.equal(found[name], expected[name]) for name in names)
