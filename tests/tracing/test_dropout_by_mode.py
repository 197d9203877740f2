"""Models that ask for their mode to choose how much dropout there is: what holds in one mode holds in the other."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import featx

Step = Callable[["Masked", Tensor], Tensor]
EXAMPLE = (2, 8, 4)
SHAPES = (EXAMPLE, (1, 8, 4), (3, 5, 4), (2, 11, 4))


class Masked(nn.Module):
    """Reads sizes and a dtype, and goes on with `step`."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.first, self.step, self.p = nn.Linear(4, 4), step, 0.25
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.shape[1]
        mask = torch.full((rows, rows), torch.finfo(x.dtype).min, dtype=x.dtype).triu(1)
        return (self.step(self, self.first(x)).transpose(1, 2) + (mask * 0).sum()).flatten(1, 2)


def attends(model: Masked, x: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(x, x, x, dropout_p=model.p if model.training else 0.0)


def attend(x: Tensor, dropout: float, scale: float) -> Tensor:
    return functional.scaled_dot_product_attention(x, x, x, None, dropout, scale=scale)


def attends_in_a_function(model: Masked, x: Tensor) -> Tensor:
    return attend(x, dropout=0.0 if not model.training else model.dropout.p, scale=0.5)


def drops_by_a_name(model: Masked, x: Tensor) -> Tensor:
    dropout_p = model.p if model.training else 0.0
    return functional.scaled_dot_product_attention(x, x, x, dropout_p=dropout_p)


DROPOUT: dict[str, Step] = {
    "attention": attends,
    "attention in a function": attends_in_a_function,
    "a name": drops_by_a_name,
    "the flag": lambda model, x: functional.dropout(x, 0.5, model.training),
    "the flag by name": lambda model, x: functional.dropout1d(x, p=0.25, training=model.training),
}


def dropout(x: Tensor, p: float, training: bool) -> Tensor:
    """Is no function of torch: takes half of the rows where it trains, counted by C code."""
    return x[:, : len(list(range(64))[: x.shape[1] - 2])] if training else x[:, : x.shape[1] - 2]


def takes_another_kernel(model: Masked, x: Tensor) -> Tensor:
    drop = 1 if model.training else 2
    return functional.avg_pool1d(x, drop, stride=1, padding=drop // 2)[..., :4]


def decides(model: Masked, x: Tensor) -> Tensor:
    drop = 3 if model.training else 6
    return x * 2 if x.shape[1] > drop else x


def counts_in_training(model: Masked, x: Tensor) -> Tensor:
    if model.training:
        return x * float(sum([1] * x.shape[1]))
    return x * x.shape[1]


def scales_in_training(model: Masked, x: Tensor) -> Tensor:
    rows = x.shape[1]
    scale = float(len([0] * rows)) if model.training else 8.0
    return x * scale


def scales_in_eval(model: Masked, x: Tensor) -> Tensor:
    rows = x.shape[1]
    scale = 8.0 if model.training else float(len([0] * rows))
    return x * scale


def drops_and_scales(model: Masked, x: Tensor) -> Tensor:
    rows = x.shape[1]
    drop = 0.0 if model.training else 0.5
    return x * (float(len([0] * rows)) if drop else 2.0)


def clamps(x: Tensor, dropout: float) -> Tensor:
    if x.dtype == torch.float64 and dropout == 0.0:
        x = x.clamp(-0.1, 0.1)
    return functional.scaled_dot_product_attention(x, x, x, dropout_p=dropout)


def clamps_in_eval(model: Masked, x: Tensor) -> Tensor:
    return clamps(x, dropout=model.p if model.training else 0.0)


def scales_by_dtype_and_mode(model: Masked, x: Tensor) -> Tensor:
    drop = model.p if model.training else 0.0
    scale = 1.0 if x.dtype == torch.float32 else (2.0 if drop else 3.0)
    return functional.dropout(x * scale, drop)


def cuts_in_eval(model: Masked, x: Tensor) -> Tensor:
    drop = model.p if model.training else 0.0
    for row, _ in enumerate([0] * x.shape[1]):
        if row > 9 and not drop:
            x = x[:, :10]
    return functional.dropout(x, drop)


def is_for_half_in_training(model: Masked, x: Tensor) -> Tensor:
    return x * 2 if model.training and x.dtype == torch.float64 else x


ELSE: dict[str, Step] = {
    "a function called dropout": lambda model, x: dropout(x, 0.5, model.training),
    "a kernel": takes_another_kernel,
    "a decision": decides,
    "a count": counts_in_training,
    "a scale": scales_in_training,
    "a scale in eval mode": scales_in_eval,
    "a scale by what is called dropout": drops_and_scales,
    "a dtype in a function": clamps_in_eval,
    "a constant by dtype and mode": scales_by_dtype_and_mode,
    "a loop": cuts_in_eval,
    "a dtype": is_for_half_in_training,
    "a scale called dropout": lambda model, x: x * (model.p if model.training else 0.0),
}


def extractor_of(model: nn.Module) -> featx.DualGraphModule:
    return featx.create_feature_extractor(model, ["output"], example_inputs=torch.rand(EXAMPLE), adaptive=False)


def require_equal(extractor: nn.Module, model: nn.Module, x: Tensor) -> None:
    torch.manual_seed(0)
    found = extractor(x)["output"]
    torch.manual_seed(0)
    expected = model(x)
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", DROPOUT)
def test_what_holds_in_one_mode_is_not_looked_for_in_the_other(name: str, caplog: pytest.LogCaptureFixture) -> None:
    model = Masked(DROPOUT[name])
    with caplog.at_level(logging.DEBUG, logger="featx"):
        extractor = extractor_of(model)
    runs = caplog.messages
    assert ["the other mode" in run for run in runs] == [False] * (len(runs) - 1) + [True]
    for training in (True, False):
        model.train(training), extractor.train(training)
        for shape in SHAPES:
            require_equal(extractor, model, torch.rand(shape))
    model.double(), extractor.double()
    for training in (True, False):
        model.train(training), extractor.train(training)
        require_equal(extractor, model, torch.rand(3, 5, 4, dtype=torch.float64))


@pytest.mark.filterwarnings("ignore:The nodes of")
@pytest.mark.parametrize("name", ELSE)
@pytest.mark.parametrize("first", [True, False])
def test_where_a_mode_decides_something_else_both_are_right(name: str, first: bool) -> None:
    model = Masked(ELSE[name]).train(first)
    extractor = extractor_of(model)
    for dtype in (torch.float32, torch.float64):
        model.to(dtype), extractor.to(dtype)
        for training in (True, False):
            model.train(training), extractor.train(training)
            for shape in SHAPES:
                try:
                    require_equal(extractor, model, torch.rand(shape, dtype=dtype))
                except featx.SpecializationError:
                    assert (shape, dtype) != (EXAMPLE, torch.float32)
