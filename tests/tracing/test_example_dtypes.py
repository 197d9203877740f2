"""Weights of another dtype than in the trace: what the model computes, or an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from agreement import agree, image, run, same
from torch import nn

import featx

CASTS = ("half", "bfloat16", "double")


class Computing(nn.Module):
    def __init__(self, compute: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.arange(4.0) / 3)
        self.register_buffer("shift", torch.ones(4))
        self.compute = compute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.compute(self, x)


READS_NONE: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "weights": lambda model, x: model.linear(torch.relu(model.linear(x))) * model.scale + model.shift.sum(),
    "sizes": lambda model, x: torch.cat([x[:, x.shape[1] // 2 :], x[:, :2]], 1) * (x.shape[0] / 3),
    "literal": lambda model, x: model.linear(x) * torch.tensor([0.1, 1.0, 2.0, 3.0]),
    "made of sizes": lambda model, x: model.linear(x) + torch.arange(x.shape[1]),
    "like another": lambda model, x: model.linear(x) + torch.full_like(x, 0.1) + x.new_ones(4),
    "to another": lambda model, x: model.linear(x).to(x) * torch.ones(4).type_as(x),
    "fixed": lambda model, x: torch.softmax(model.linear(x).float(), -1) + x.double().sum(),
    "bytes": lambda model, x: model.linear(x) * x.element_size(),
    "is floating": lambda model, x: model.linear(x) if x.is_floating_point() else x,
}
READS_ONE: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "of an input": lambda model, x: model.linear(x) + torch.ones(4, dtype=x.dtype) / 3,
    "of a result": lambda model, x: (model.linear(x).float() / 3).to(model.linear(x).dtype),
    "of a weight": lambda model, x: model.linear(x.to(model.linear.weight.dtype)) / 3,
    "of the first weight": lambda model, x: model.linear(x.to(next(model.parameters()).dtype)) / 3,
    "of a buffer": lambda model, x: x * torch.full((4,), 0.1, dtype=model.shift.dtype),
    "its limits": lambda model, x: model.linear(x).clamp(min=torch.finfo(x.dtype).eps),
    "to decide": lambda model, x: model.linear(x) if x.dtype == torch.float32 else model.linear(x) * 3,
    "as a key": lambda model, x: x * {torch.float32: 2, torch.float64: 3}.get(x.dtype, 5),
}


def twins(compute: Callable[[Any, torch.Tensor], torch.Tensor]) -> tuple[Computing, Computing]:
    """Return two models with the same weights."""
    model, twin = Computing(compute), Computing(compute)
    twin.load_state_dict(model.state_dict())
    return model, twin


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("name", READS_NONE)
def test_graph_that_read_no_dtype_computes_in_every_dtype_what_the_model_does(name: str, cast: str) -> None:
    model, twin = twins(READS_NONE[name])
    traced = getattr(featx.trace(model, image()), cast)()
    x = getattr(image(5, seed=1), cast)()
    assert same(traced(x), getattr(twin, cast)()(x))


@pytest.mark.parametrize("name", READS_ONE)
def test_graph_that_read_a_dtype_holds_in_that_one_and_refuses_the_others(name: str) -> None:
    model, twin = twins(READS_ONE[name])
    traced = agree(model, (image(),), (image(5, seed=1),))
    for cast in CASTS:
        with pytest.raises(featx.SpecializationError, match="dtype"):
            getattr(traced, cast)()(getattr(image(), cast)())
    assert same(traced.float()(image()), model(image()))
    # In another dtype the model computes something else: an answer would have been wrong.
    assert not any(same(model(image()), getattr(twin, cast)()(getattr(image(), cast)())) for cast in CASTS)


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("name", READS_ONE)
def test_module_that_stays_whole_reads_the_dtype_anew(name: str, cast: str) -> None:
    model, twin = (nn.Sequential(inner, nn.Identity()) for inner in twins(READS_ONE[name]))
    extractor = featx.create_feature_extractor(model, ["0", "1"], example_inputs=image())
    x = getattr(image(5, seed=1), cast)()
    expected = getattr(twin, cast)()(x)
    assert same(getattr(extractor, cast)()(x), {"0": expected, "1": expected})


def test_cast_of_the_model_itself_is_seen_by_its_extractor() -> None:
    model = Computing(READS_NONE["weights"])
    extractor = featx.create_feature_extractor(model, ["relu"], example_inputs=image())
    model.double()
    assert same(extractor(image().double())["relu"], torch.relu(model.linear(image().double())))


def test_model_that_runs_in_half_precision_is_traced_in_it() -> None:
    model, _ = twins(READS_ONE["of an input"])
    agree(model.bfloat16(), (image().bfloat16(),), (image(5).bfloat16(),))


def test_input_of_another_dtype_than_the_example_is_promoted_as_in_the_model() -> None:
    model, _ = twins(lambda model, x: x * model.scale)
    traced = featx.trace(model, image())
    for dtype in (torch.float64, torch.float16, torch.int64, torch.bool, torch.complex64):
        assert same(run(traced, image().to(dtype)), run(model, image().to(dtype)))
