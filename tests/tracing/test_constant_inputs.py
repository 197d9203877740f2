"""Inputs that are no tensors are constants of the graph: of the same class and value again, or the graph refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import featx
from featx import SpecializationError

X = torch.arange(8.0).reshape(2, 4)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Any, scale: Any = 1.0) -> Any:
        return self.linear(x) * scale


class Timed(nn.Module):
    def forward(self, x: Any, time: Any) -> Any:
        time = torch.full((len(x),), time) if not torch.is_tensor(time) else time.float() * 2
        return x * time.reshape(-1, 1)


class Divides(nn.Module):
    def forward(self, x: Any, by: Any = 2) -> Any:
        return (x // by if isinstance(by, int) else x / by) + 0


class Signed(nn.Module):
    def forward(self, x: Any, zero: Any = 0.0) -> Any:
        return x * (1.0 / torch.tensor(zero)).sign()


class Sized(nn.Module):
    def forward(self, x: Any, size: Any = (2, 2)) -> Any:
        return x.reshape(*size, -1) if isinstance(size, tuple) else x


class Cast(nn.Module):
    def forward(self, x: Any, dtype: Any = torch.float32) -> Any:
        return x.to(dtype)


OTHERS: list[tuple[type[nn.Module], tuple[Any, ...], Any]] = [
    (Scaled, (1.0,), nn.Parameter(torch.ones(()))),
    (Scaled, (), nn.Parameter(torch.ones(()))),
    (Scaled, (1.0,), torch.ones(1, 1, 1)),
    (Scaled, (), torch.ones(2, 1, 1)),
    (Scaled, (1.0,), torch.ones(1, 1, dtype=torch.float64)),
    (Scaled, (1.0,), True),
    (Timed, (7,), torch.tensor(7)),
    (Timed, (7,), torch.tensor([7, 7])),
    (Divides, (2,), 2.0),
    (Divides, (), 2.0),
    (Signed, (0.0,), -0.0),
    (Signed, (), -0.0),
    (Sized, ((2, 2),), [2, 2]),
    (Sized, (), [2, 2]),
    (Sized, (), (2, 1)),
    (Cast, (torch.float32,), torch.float64),
    (Cast, (), torch.float64),
]


@pytest.mark.parametrize(("kind", "example", "other"), OTHERS)
def test_equal_value_of_another_class_is_refused(kind: type[nn.Module], example: tuple[Any, ...], other: Any) -> None:
    graph = featx.trace(kind(), X, *example)
    with pytest.raises(SpecializationError, match="input '"):
        graph(X, other)


# The names of nodes are others where `Timed` and `Sized` go another way.
@pytest.mark.parametrize(("kind", "example", "other"), [row for row in OTHERS if row[0] not in (Timed, Sized)])
def test_adaptive_extractor_traces_it_again(kind: type[nn.Module], example: tuple[Any, ...], other: Any) -> None:
    torch.manual_seed(0)
    model = kind()
    name = featx.get_graph_node_names(model, example_inputs=(X, *example))[1][-1]
    extractor = featx.create_feature_extractor(model, [name], example_inputs=(X, *example), adaptive=True)
    extractor(X, *example)
    expected = model(X, other)
    found = extractor(X, other)[name]
    assert (found.dtype, found.shape, found.requires_grad) == (expected.dtype, expected.shape, expected.requires_grad)
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("kind", "example", "same"),
    [
        (Scaled, (1.0,), 1.0), (Scaled, (), 1.0), (Timed, (7,), 7), (Divides, (), 2), (Sized, (), (2, 2)),
        (Sized, ((2, 2),), (2, 2)), (Cast, (torch.float32,), torch.float32),
    ],
)  # fmt: skip
def test_the_same_value_is_taken(kind: type[nn.Module], example: tuple[Any, ...], same: Any) -> None:
    model = kind()
    graph = featx.trace(model, X, *example)
    assert torch.equal(graph(X + 1, same), model(X + 1, same))


def test_input_that_was_left_out_may_be_left_out_or_be_the_default() -> None:
    model = Sized()
    graph = featx.trace(model, X)
    assert torch.equal(graph(X), graph(X, (2, 2)))
