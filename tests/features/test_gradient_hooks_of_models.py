"""Hooks for gradients that forward registers, or that modules have."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import featx

X = torch.rand(2, 6)


class Reverses(nn.Module):
    """Reverses the gradient of a value that is requested."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.last = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        if h.requires_grad:
            h.register_hook(lambda gradient: -3 * gradient)
        return self.last(h)


@pytest.mark.parametrize("names", [["first"], ["first", "output"]])
def test_hook_on_a_requested_value_stays(names: list[str]) -> None:
    model, seen = Reverses(), []
    handle = model.first.register_forward_hook(lambda module, args, result: seen.append(result))
    model(X)
    handle.remove()
    expected = torch.autograd.grad(seen[0].sum(), model.first.weight)[0]
    got = featx.create_feature_extractor(model, names, example_inputs=X)(X)["first"]
    assert torch.equal(torch.autograd.grad(got.sum(), model.first.weight)[0], expected)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x).relu()


@pytest.mark.parametrize("tracer", ["example", "symbolic", "auto"])
def test_hook_of_a_module_is_kept_or_the_names_inside_are_refused(tracer: str) -> None:
    model = nn.Sequential(nn.Linear(6, 6), Block(), nn.Linear(6, 6))
    model[1].register_full_backward_hook(lambda module, given, received: (given[0] * 5,))
    with pytest.raises(featx.TraceError, match="backward hooks"):
        featx.create_feature_extractor(model, ["1.fc", "2"], tracer=tracer)
    if tracer != "symbolic":  # which opens the block
        got = featx.create_feature_extractor(model, ["2"], tracer=tracer)(X)["2"]
        expected = torch.autograd.grad(model(X).sum(), model[0].weight)[0]
        assert torch.equal(torch.autograd.grad(got.sum(), model[0].weight)[0], expected)


@pytest.mark.parametrize("tracer", ["example", "symbolic"])
def test_hook_of_the_model_itself_is_for_what_it_returns(tracer: str) -> None:
    model = Block()
    model.register_full_backward_hook(lambda module, given, received: (given[0] * 5,))
    with pytest.raises(featx.TraceError, match=r"backward hooks.*remove"):
        featx.create_feature_extractor(model, ["output"], tracer=tracer)
    got = featx.create_feature_extractor(model, ["fc"], tracer=tracer)(X)["fc"]
    assert torch.equal(got, model.fc(X))
