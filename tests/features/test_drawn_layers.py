"""Models that skip layers by random numbers in train mode, as those of speech do."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import featx

X = torch.rand(2, 4)


class DropsLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if not (self.training and torch.rand([]) < 0.5):
                x = layer(x)
        return x


def seeds(*, dropped: bool) -> list[int]:
    """Seeds with which train mode drops the third layer, or does not."""
    found: list[int] = []
    for seed in range(40):
        torch.manual_seed(seed)
        if [bool(torch.rand([]) < 0.5) for _ in range(4)][2] is dropped:
            found.append(seed)
    return found[:4]


@pytest.mark.parametrize("seed", [*seeds(dropped=True), *seeds(dropped=False)])
def test_extractor_of_a_model_in_eval_mode_never_depends_on_draws(seed: int) -> None:
    model = DropsLayers().eval()
    torch.manual_seed(seed)
    extractor = featx.create_feature_extractor(
        model, ["layers.2"], example_inputs=X, suppress_diff_warning=True, adaptive=False
    )
    expected = model.layers[2](model.layers[1](model.layers[0](X)))
    assert torch.equal(extractor(X)["layers.2"], expected)
    results: list[bool] = []
    for _ in range(20):  # train mode has no graph, or one for one outcome
        try:
            results.append(torch.isfinite(extractor.train()(X)["layers.2"]).all().item() is True)
        except featx.TraceError:
            continue
    assert len(results) < 20


@pytest.mark.parametrize("seed", seeds(dropped=True)[:1])
def test_a_layer_that_is_dropped_in_the_present_mode_is_told_to_be_so(seed: int) -> None:
    model = DropsLayers().train()
    torch.manual_seed(seed)
    with pytest.raises(featx.NodeNameError, match="decides by random numbers what runs"):
        featx.create_feature_extractor(model, ["layers.2"], example_inputs=X, suppress_diff_warning=True)


def test_a_name_that_is_missing_for_another_reason_is_an_error_in_both_modes() -> None:
    class InEval(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if self.training else self.last(x)

    with pytest.raises(featx.NodeNameError, match="No node 'last' in InEval"):
        featx.create_feature_extractor(InEval().eval(), ["last"], example_inputs=X, suppress_diff_warning=True)


def test_decision_by_a_random_number_says_that_it_is_drawn() -> None:
    torch.manual_seed(0)
    extractor = featx.create_feature_extractor(
        DropsLayers(), ["output"], example_inputs=X, suppress_diff_warning=True
    ).train()
    with pytest.raises(featx.SpecializationError, match="The model draws this at random") as caught:  # noqa: PT012
        for _ in range(20):
            extractor(X)
    assert "adaptive=True" not in str(caught.value)


class Attends(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(x, x, x)


class AttendsSometimes(nn.Module):
    """Attends in train mode with a chance of one half, as HuBERT does with layerdrop."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.last = Attends(), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not (self.training and torch.rand([]) < 0.5):
            x = self.attention(x)
        return self.last(x)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("wanted", ["attention.probabilities", "**.probabilities"])
def test_probabilities_of_a_layer_that_the_other_mode_drops(wanted: str, seed: int) -> None:
    model, x = AttendsSometimes().eval(), torch.rand(1, 2, 3, 4)
    torch.manual_seed(seed)
    found = featx.create_feature_extractor(model, [wanted], example_inputs=x, suppress_diff_warning=True)(x)
    assert found["attention.probabilities"].shape == (1, 2, 3, 3)
