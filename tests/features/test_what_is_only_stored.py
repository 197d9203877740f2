"""Lists, counters and logs that forward fills and never reads: a graph leaves them out, as it does attributes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import featx

X = torch.rand(2, 4, generator=torch.Generator().manual_seed(0))


class Recording(nn.Module):
    """What users write to look at values later."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)
        self.seen: list[Any] = []
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        self.seen.append(y.detach())
        self.calls += 1
        return self.last(y)

    def shown(self) -> list[Any]:
        return self.seen


@pytest.mark.parametrize("name", ["first", "last"])
def test_what_is_never_read_is_left_out(name: str) -> None:
    torch.manual_seed(0)
    model = Recording().eval()
    extractor = featx.create_feature_extractor(model, [name], example_inputs=X)
    for factor in (1, 2):
        expected = model.first(X * factor) if name == "first" else model(X * factor)
        assert torch.equal(extractor(X * factor)[name], expected)
    assert model.calls == (0 if name == "first" else 2)  # by the calls of the model alone


class Deciding(Recording):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        self.seen.append(1)
        return self.last(y) * (2 if len(self.seen) > 3 else 1)


class Counting(Recording):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.last(self.first(x)) * (0.5 if self.calls > 3 else 1.0)


class Taking(Recording):
    def __init__(self) -> None:
        super().__init__()
        self.seen = [1.0, 2.0, 3.0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x)) * self.seen.pop()


class Shared(Recording):
    """Reads its list by another name."""

    def __init__(self) -> None:
        super().__init__()
        self.other = self.seen

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(1)
        return self.last(self.first(x)) * (2 if len(self.other) > 3 else 1)


class Asking(Recording):
    """Reads its counter by a function that is an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.factor: Callable[[Any], int] = lambda model: 2 if model.calls > 3 else 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.last(self.first(x)) * self.factor(self)


class Hooked(Recording):
    """Reads its counter in a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.register_forward_hook(lambda module, args, output: output * (2 if module.calls > 3 else 1))


class Named(Recording):
    """Reads its counter by a computed name."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.last(self.first(x)) * (2 if getattr(self, "".join(["ca", "lls"])) > 3 else 1)


class Parent(nn.Module):
    """Reads the counter of its submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Recording()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        return y * (2 if self.inner.calls > 3 else 1)


READING: list[Callable[[], nn.Module]] = [Deciding, Counting, Taking, Shared, Asking, Hooked, Named, Parent]


@pytest.mark.parametrize("make", READING)
def test_what_is_read_is_refused_or_followed(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = make().eval()
    with pytest.raises(featx.TraceError):
        featx.create_feature_extractor(model, ["output"], example_inputs=X)
