"""cost and profile of extractors that have a graph for each kind of input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import featx


class ByPadding(nn.Module):
    """Leaves out a mask without padding, as text models do; the layer after a mask has 16 times 16 weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.masked = nn.Linear(4, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        x = self.first(x)
        if mask is None or bool(mask.all()):
            return x
        return self.masked(x) * mask[..., None]


X = torch.rand(2, 3, 4)
FULL, PADDED = torch.ones(2, 3, dtype=torch.bool), torch.tensor([[True, True, True], [True, False, False]])
PLAIN = 2 * 2 * 3 * 4 * 16
FLOPS = [((X,), PLAIN), ((X, FULL), PLAIN), ((X, PADDED), PLAIN + 2 * 2 * 3 * 16 * 16)]


def extractors() -> list[Any]:
    made = [featx.create_feature_extractor(ByPadding().eval(), ["output"], example_inputs=(X, PADDED))]
    return [*made, featx.create_feature_extractor(ByPadding().eval(), ["output"], example_inputs=X, adaptive=True)]


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1], ids=["by itself", "adaptive"])
def test_the_graph_that_holds_for_the_inputs_is_counted_and_measured(number: int) -> None:
    extractor = extractors()[number]
    for _ in range(2):
        for inputs, flops in FLOPS:
            assert featx.cost(extractor, *inputs).total.flops == flops
        extractor(X, PADDED)  # keeps a graph for it
    assert featx.profile(extractor, X, PADDED, repeats=1, warmup=0).nodes


def test_inputs_of_an_extractor_are_by_default_those_that_it_was_made_with() -> None:
    extractor = featx.create_feature_extractor(nn.Sequential(nn.Linear(4, 16)).eval(), ["0"], example_inputs=X)
    assert featx.cost(extractor).total.flops == PLAIN


def test_a_dict_has_the_inputs_of_a_model_by_name() -> None:
    model = ByPadding().eval()
    assert featx.cost(model, {"x": X, "mask": PADDED}).total.flops == FLOPS[2][1]
    assert torch.equal(featx.trace(model, {"x": X})(X), model(X))


class TakesDict(nn.Module):
    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return batch["image"] * 2


class TakesDictOfItsName(nn.Module):
    def forward(self, batch: Any) -> Any:
        return batch["batch"] * 2


def test_a_dict_whose_key_is_the_name_of_the_input_is_that_input() -> None:
    batch = {"batch": X}
    assert torch.equal(featx.trace(TakesDictOfItsName(), batch)(batch), X * 2)


def test_a_dict_that_the_model_takes_is_its_input() -> None:
    batch = {"image": X}
    assert torch.equal(featx.trace(TakesDict(), batch)(batch), X * 2)


class Doubling(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


@pytest.mark.parametrize("use", [featx.trace, featx.cost, featx.profile, featx.draw])
def test_a_model_that_declares_no_inputs_is_to_be_given_some(use: Any) -> None:
    with pytest.raises(featx.ArgumentTypeError, match=r"Doubling does not declare its inputs; .* forward\(x: "):
        use(Doubling())


@pytest.mark.parametrize("name", ["graph", "extractors", "graph_modules_for"])
@pytest.mark.parametrize("function", [featx.cost, featx.profile, featx.draw], ids=lambda function: function.__name__)
def test_model_with_an_attribute_that_extractors_have_is_a_model(function: Any, name: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            setattr(self, name, (2.0,))
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) * getattr(self, name)[0]

    result = function(Model().eval(), torch.rand(4, 4))
    assert "layer" in (result.html() if function is featx.draw else str(result))
