"""The form that a trace takes for the results of recurrent layers is that which torch computes step by step."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import featx
from featx.tracing.stand_ins.recurrent import check_states_of_packed, form_of_recurrent, is_recurrent


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


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 6, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(12, 4)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor, states: Any = None) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        found, _ = self.lstm(packed, states)
        return self.head(nn.utils.rnn.pad_packed_sequence(found, batch_first=True)[0])


@pytest.mark.slow
def test_states_for_a_packed_sequence() -> None:
    """Where their lengths differ, kernels of torch read memory that is not theirs: no run at other sizes may do so."""
    model = Tagger().eval()
    x, lengths = torch.rand(2, 6, 8), torch.tensor([6, 3])
    states = (torch.rand(4, 2, 6), torch.rand(4, 2, 6))
    extractor = featx.create_feature_extractor(model, ["output"], example_inputs=(x, lengths, states), adaptive=True)
    for given in (states, (states[1], states[0])):
        assert torch.equal(extractor(x, lengths, given)["output"], model(x, lengths, given))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("shape", [(5, 2, 6), (4, 3, 6)])
def test_states_of_other_lengths_are_refused_ahead_of_the_kernel(kind: Any, shape: tuple[int, ...]) -> None:
    layer = kind(8, 6, 2, bidirectional=True)
    packed = nn.utils.rnn.pack_padded_sequence(torch.rand(6, 2, 8), torch.tensor([6, 3]))
    states = torch.ones(shape) if kind is not nn.LSTM else (torch.ones(4, 2, 6), torch.ones(shape))
    name = layer.mode.lower()
    function = getattr(torch._VF, name)
    args = [packed.data, packed.batch_sizes, states, layer._flat_weights, True, 2, 0.0, False, True]
    with pytest.raises(RuntimeError, match=r"first two lengths must be \(4, 2\)"):
        check_states_of_packed(function, tuple(args))
    args[2] = torch.ones(4, 2, 6) if kind is not nn.LSTM else (torch.ones(4, 2, 6), torch.ones(4, 2, 6))
    check_states_of_packed(function, tuple(args))
