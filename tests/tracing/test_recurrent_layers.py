"""The form that a trace takes for the results of recurrent layers is that which torch computes step by step."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import featx
from featx.tracing.stand_ins.recurrent import form_of_recurrent, is_recurrent


def _calls_of(layer: nn.RNNBase, given: Tensor) -> list[tuple[Any, tuple[Any, ...]]]:
    """Return the torch functions that a layer calls, with the arguments."""
    found: list[tuple[Any, tuple[Any, ...]]] = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if is_recurrent(function, args, kwargs or {}):
                found.append((function, args))
            return function(*args, **(kwargs or {}))

    with Watch():
        layer(given)
    return found


def _forms(values: Any) -> list[tuple[Any, ...]]:
    return [(each.shape, each.stride(), each.dtype, each.requires_grad) for each in values]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("has_gradient", [False, True])
def test_form_is_that_of_all_steps(kind: Any, batch_first: bool, has_gradient: bool) -> None:
    for layers, bidirectional, projection in itertools.product((1, 2), (False, True), (0, 3)):
        if projection and kind is not nn.LSTM:
            continue
        options = {"proj_size": projection} if projection else {}
        layer = kind(4, 5, layers, batch_first=batch_first, bidirectional=bidirectional, device="meta", **options)
        layer.requires_grad_(has_gradient)
        ((function, args),) = _calls_of(layer, torch.empty(2, 7, 4, device="meta"))
        assert _forms(form_of_recurrent(function, args)) == _forms(function(*args))


def test_relu_and_one_step() -> None:
    layer = nn.RNN(4, 5, nonlinearity="relu", device="meta")
    assert len(_calls_of(layer, torch.empty(3, 2, 4, device="meta"))) == 1
    assert not _calls_of(layer, torch.empty(1, 2, 4, device="meta"))


class _Speech(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.rnn = kind(6, 5, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        outputs, state = self.rnn(x)
        last = state[0] if isinstance(state, tuple) else state
        return self.head(outputs).mean(1) + last.sum()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_features_at_other_lengths_are_those_of_the_model(kind: Any) -> None:
    torch.manual_seed(0)
    model = _Speech(kind).eval()
    extractor = featx.create_feature_extractor(model, ["rnn", "head", "output"], example_inputs=torch.rand(2, 9, 6))
    for batch, length in ((2, 9), (1, 30), (5, 1)):
        x = torch.rand(batch, length, 6)
        out = extractor(x)
        assert torch.equal(out["output"], model(x))
        assert torch.equal(out["rnn"][0], model.rnn(x)[0])
        assert torch.equal(out["head"], model.head(model.rnn(x)[0]))


class _Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(6, 5, batch_first=True)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        outputs, _ = self.rnn(packed)
        return self.head(pad_packed_sequence(outputs, batch_first=True)[0])


@pytest.mark.slow
def test_packed_sequences() -> None:
    torch.manual_seed(0)
    model = _Packed().eval()
    example = (torch.rand(3, 9, 6), torch.tensor([4, 9, 2]))
    extractor = featx.create_feature_extractor(model, ["head"], example_inputs=example)
    assert torch.equal(extractor(*example)["head"], model(*example))
    other = (torch.rand(3, 9, 6), torch.tensor([9, 3, 5]))
    assert torch.equal(extractor(*other)["head"], model(*other))
