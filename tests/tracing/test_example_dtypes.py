"""Weights of another dtype than in the trace: what the model computes, or an error."""

from __future__ import annotations

import operator
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
    "is floating": lambda model, x: model.linear(x) if x.is_floating_point() else x,
}
READS_ONE: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "of an input": lambda model, x: model.linear(x) + torch.ones(4, dtype=x.dtype) / 3,
    "of a result": lambda model, x: (model.linear(x).float() / 3).to(model.linear(x).dtype),
    "of a weight": lambda model, x: model.linear(x.to(model.linear.weight.dtype)) / 3,
    "of the first weight": lambda model, x: model.linear(x.to(next(model.parameters()).dtype)) / 3,
    "of a buffer": lambda model, x: x * torch.full((4,), 0.1, dtype=model.shift.dtype),
    "its limits": lambda model, x: model.linear(x).clamp(min=torch.finfo(x.dtype).eps),
    "bytes": lambda model, x: model.linear(x) * x.element_size(),
    "bytes, unseen": lambda model, x: (
        model.linear(x) * sum([1, 1, 2, 3, 5, 8, 13, 21][: operator.index(x.element_size())])
    ),
    "bytes of a weight": lambda model, x: model.linear(x) * model.scale.itemsize,
    "as a key": lambda model, x: x * {torch.float32: 2, torch.float64: 3}.get(x.dtype, 5),
}
DOES_SOMETHING_ELSE: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "to decide": lambda model, x: model.linear(x) if x.dtype == torch.float32 else model.linear(x) * 3,
    "on the way": lambda model, x: model.linear(x) * (2 if x.dtype.itemsize == 4 else model.shift * 3),
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
@pytest.mark.parametrize("cast", CASTS)
def test_graph_that_read_a_dtype_follows_it(name: str, cast: str) -> None:
    model, twin = twins(READS_ONE[name])
    traced = agree(model, (image(),), (image(5, seed=1),))
    x = getattr(image(5, seed=1), cast)()
    assert same(getattr(traced, cast)()(x), getattr(twin, cast)()(x))
    assert same(traced.float()(image()), model(image()))


@pytest.mark.parametrize("name", DOES_SOMETHING_ELSE)
def test_graph_of_a_model_that_does_something_else_in_another_dtype_refuses_it(name: str) -> None:
    model, twin = twins(DOES_SOMETHING_ELSE[name])
    traced = agree(model, (image(),), (image(5, seed=1),))
    for cast in CASTS:
        with pytest.raises(featx.SpecializationError, match="dtype"):
            getattr(traced, cast)()(getattr(image(), cast)())
    assert same(traced.float()(image()), model(image()))
    # In another dtype the model computes something else: an answer would have been wrong.
    assert not any(same(model(image()), getattr(twin, cast)()(getattr(image(), cast)())) for cast in CASTS)


def test_dtypes_are_followed_as_far_as_the_model_does_the_same() -> None:
    model, twin = twins(lambda model, x: x.to(x.dtype) * 3 if x.dtype in (torch.float32, torch.float64) else x * 3)
    traced = featx.trace(model, image())
    assert same(traced(image().double()), twin(image().double()))
    with pytest.raises(featx.SpecializationError, match=r"torch.float16 now.*torch.float32, torch.float64"):
        traced(image().half())


def mixed(model: Any, x: torch.Tensor) -> torch.Tensor:
    return x.to(model.scale.dtype) * model.scale + torch.ones(4, dtype=x.dtype)


def test_dtypes_that_no_trace_had_together_are_refused() -> None:
    model, twin = twins(mixed)
    traced = featx.trace(model, image())
    assert same(traced(image()), twin(image()))
    with pytest.raises(featx.SpecializationError, match="dtype"):
        traced(image().double())
    traced.double(), twin.double()
    assert same(traced(image().double()), twin(image().double()))
    with pytest.raises(featx.SpecializationError, match="dtype"):
        traced(image())


def test_model_of_two_dtypes_is_traced_as_it_is_and_in_one() -> None:
    model, twin = twins(mixed)
    model.scale.data, twin.scale.data = model.scale.data.bfloat16(), twin.scale.data.bfloat16()
    traced = featx.trace(model, image())
    assert same(traced(image()), twin(image()))
    assert same(traced.half()(image().half()), twin.half()(image().half()))


def test_constants_that_follow_a_dtype_are_in_the_code() -> None:
    traced = featx.trace(Computing(READS_ONE["its limits"]), image())
    eps = {dtype: torch.finfo(dtype).eps for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16)}
    lookup = next(node for node in traced.graph.nodes if node.name == "by_dtype")
    assert lookup.args[0] == eps
    read = lookup.args[1]
    assert isinstance(read, featx.Node)
    assert read.args == (traced.graph.find_nodes(op="placeholder")[0], "dtype")


def test_dtypes_are_followed_in_a_model_that_asks_for_values() -> None:
    def compute(model: Any, x: torch.Tensor) -> torch.Tensor:
        ones = torch.ones(4, dtype=x.dtype)
        if bool(ones.sum() == 4) and bool((model.shift > 0).all()):
            x = x * (ones / 3)
        if x.requires_grad or bool((x > 100).any()):
            return x
        return x * torch.finfo(x.dtype).eps

    model, twin = twins(compute)
    traced = agree(model, (image(),), (image(5, seed=1),))
    for cast in CASTS:
        x = getattr(image(5, seed=1), cast)()
        assert same(getattr(traced, cast)()(x), getattr(twin, cast)()(x))
        with pytest.raises(featx.SpecializationError, match="any"):
            traced(x * 1000)


def test_value_that_is_the_same_memory_in_another_dtype_is_cloned_in_an_extractor_that_follows_dtypes() -> None:
    def compute(model: Any, x: torch.Tensor) -> torch.Tensor:
        doubled = x * torch.tensor(2, dtype=x.dtype)
        return doubled.to(torch.float64).add_(1)

    model, _ = twins(compute)
    extractor = featx.create_feature_extractor(model, ["mul", "add_"], example_inputs=image())
    assert same(extractor(image().double()), {"mul": image().double() * 2, "add_": image().double() * 2 + 1})


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
