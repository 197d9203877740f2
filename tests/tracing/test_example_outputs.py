"""What a traced model returns has the form of what the model returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from agreement import agree, image, same
from torch import nn

import featx


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


@dataclass
class Result:
    logits: torch.Tensor
    loss: torch.Tensor | None = None


OUTPUTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "tuple": lambda x: (x + 1, x * 2),
    "list": lambda x: [x + 1, [x * 2]],
    "dict": lambda x: {"a": x + 1, "b": {"c": x * 2}},
    "none": lambda x: (x + 1, None),
    "named": lambda x: Pair(x + 1, x * 2),
    "number": lambda x: (x + 1, x.shape[0], 3),
    "input": lambda x: x,
    "view": lambda x: x.t(),
    "topk": lambda x: torch.topk(x, 2),
}


class Returning(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: torch.Tensor) -> Any:
        return OUTPUTS[self.kind](x)


@pytest.mark.parametrize("kind", [kind for kind in OUTPUTS if kind != "topk"])
def test_output_has_the_form_of_the_models(kind: str) -> None:
    agree(Returning(kind), (image(),), (image(5, 6),))


def test_output_of_a_function_with_several_results_has_the_same_values() -> None:
    traced = featx.trace(Returning("topk"), image())
    assert all(map(torch.equal, traced(image(3, 6)), torch.topk(image(3, 6), 2)))


class ReturningObject(nn.Module):
    def forward(self, x: torch.Tensor) -> Result:
        return Result(x + 1)


def test_output_that_is_a_dataclass_is_built_by_the_graph() -> None:
    result = featx.trace(ReturningObject(), image())(image(5))
    assert type(result) is Result
    assert same(result.logits, image(5) + 1)
    assert result.loss is None
