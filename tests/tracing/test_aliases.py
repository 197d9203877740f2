"""Inputs that are one tensor: what a model does with them, and what it would do with different ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import featx
from featx.errors import SpecializationError, TraceError

Inputs = Callable[[torch.Tensor], tuple[Any, ...]]


class Compares(nn.Module):
    """Does something else where both inputs are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return self.linear(a) * 2 if a is b else self.linear(a) + self.linear(b).relu()


class Writes(nn.Module):
    """Writes one input and reads the other one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None = None) -> torch.Tensor:
        a.mul_(2)
        return self.linear(a) + self.linear(b if c is None else b + c)


class Nested(nn.Module):
    """Compares tensors in containers."""

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        first, second = batch["pair"]
        return first * 2 if first is batch["again"] else first + second


def same(x: torch.Tensor) -> tuple[Any, ...]:
    return x, x


def different(x: torch.Tensor) -> tuple[Any, ...]:
    return x, x.clone()


def same_nested(x: torch.Tensor) -> tuple[Any, ...]:
    return ({"pair": [x, x + 1], "again": x},)


def different_nested(x: torch.Tensor) -> tuple[Any, ...]:
    return ({"pair": [x, x + 1], "again": x.clone()},)


CASES: list[tuple[nn.Module, Inputs, Inputs]] = [
    (Compares(), same, different),
    (Writes(), same, different),
    (Writes(), lambda x: (x.clone(), x, x), lambda x: (x, x, x)),
    (Nested(), same_nested, different_nested),
]


def outcome(function: Callable[..., Any], inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what a function gives for inputs that are made of a tensor, and that tensor afterwards."""
    x = torch.linspace(-1, 1, 12).reshape(3, 4)
    result = function(*inputs(x))
    return (result["output"] if isinstance(result, dict) else result), x


@pytest.mark.parametrize(("model", "inputs", "others"), CASES)
@pytest.mark.parametrize("is_turned", [False, True])
def test_the_graph_holds_for_inputs_that_are_one_tensor_where_the_example_s_are(
    model: nn.Module, inputs: Inputs, others: Inputs, is_turned: bool
) -> None:
    inputs, others = (others, inputs) if is_turned else (inputs, others)
    extractor = featx.create_feature_extractor(model, ["output"], example_inputs=inputs(torch.ones(3, 4)))
    torch.testing.assert_close(outcome(extractor, inputs), outcome(model, inputs), rtol=0, atol=0)
    with pytest.raises(featx.SpecializationError, match="one tensor"):
        outcome(extractor, others)


@pytest.mark.parametrize(("model", "inputs", "others"), CASES)
def test_adaptive_extractors_have_a_graph_for_each(model: nn.Module, inputs: Inputs, others: Inputs) -> None:
    extractor = featx.create_feature_extractor(
        model, ["output"], example_inputs=inputs(torch.ones(3, 4)), adaptive=True
    )
    for each in (inputs, others, inputs):
        torch.testing.assert_close(outcome(extractor, each), outcome(model, each), rtol=0, atol=0)


def test_sizes_stay_free() -> None:
    model = Compares()
    extractor = featx.create_feature_extractor(model, ["output"], example_inputs=same(torch.ones(3, 4)))
    x = torch.randn(7, 4)
    assert torch.equal(extractor(x, x)["output"], model(x, x))


@pytest.mark.parametrize("need_weights", [True, False])
def test_self_attention_of_the_root(need_weights: bool) -> None:
    model = nn.MultiheadAttention(16, 4, batch_first=True).eval()
    x = torch.randn(2, 5, 16)
    options = {"need_weights": need_weights}
    gm = featx.trace(model, x, x, x, **options)
    for size in (5, 8):
        x = torch.randn(3, size, 16)
        got, expected = gm(x, x, x, **options), model(x, x, x, **options)
        assert torch.equal(got[0], expected[0])
        assert got[1] is expected[1] is None or torch.equal(got[1], expected[1])


def test_inputs_of_which_nothing_depends_on_it_may_be_one_tensor_or_not() -> None:
    class Adds(nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return a.relu() + b

    extractor = featx.create_feature_extractor(Adds(), ["relu"], example_inputs=same(torch.ones(3, 4)))
    for inputs in (same, different):
        assert torch.equal(extractor(*inputs(-torch.ones(3, 4)))["relu"], torch.zeros(3, 4))


class Late(nn.Module):
    """Compares its inputs after a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor | None = None) -> torch.Tensor:
        x = self.first(a)
        return self.second(x) * 2 if b is c else self.second(x) + b * c


@pytest.mark.parametrize("starts", [["first"], ["first", "b"]])
def test_an_extractor_that_starts_in_the_middle_needs_the_inputs_that_are_one_tensor(starts: list[str]) -> None:
    x = torch.randn(3, 4)
    with pytest.raises(featx.RequestError, match="the example gives one tensor as two inputs"):
        featx.create_feature_extractor(Late(), ["output"], example_inputs=(x, x, x), inputs=starts)


def test_an_extractor_of_one_tensor_as_all_inputs_needs_no_option_that_was_left_out() -> None:
    model, x = Late(), torch.randn(3, 4)
    extractor = featx.create_feature_extractor(model, ["output"], example_inputs=(x, x, x), inputs=["a", "b", "c"])
    assert torch.equal(extractor(x, x, x)["output"], model(x, x, x))
    with pytest.raises(featx.SpecializationError, match="one tensor"):
        extractor(x, x, x.clone())


def test_inputs_that_are_left_are_checked() -> None:
    model, x = Late(), torch.randn(3, 4)
    example = (x, x + 1, x + 2)
    extractor = featx.create_feature_extractor(model, ["output"], example_inputs=example, inputs=["first", "b", "c"])
    assert torch.equal(extractor(model.first(x), x + 1, x + 2)["output"], model(*example))
    with pytest.raises(featx.SpecializationError, match="one tensor"):
        extractor(model.first(x), x, x)


def test_code_that_stands_alone_checks_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Compares()
    extractor = featx.create_feature_extractor(model, ["output"], example_inputs=same(torch.ones(3, 4)))
    assert isinstance(extractor, featx.GraphModule)
    extractor.to_folder(tmp_path / "compares", "Compares")
    monkeypatch.syspath_prepend(tmp_path)
    module = __import__("compares")
    alone = module.Compares()
    torch.testing.assert_close(outcome(alone, same), outcome(copy.deepcopy(model), same), rtol=0, atol=0)
    with pytest.raises(module.SpecializationError, match="one tensor"):
        outcome(alone, different)


class HasAnId(nn.Module):
    """Has an attribute called like the builtin."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.last, self.id = (
            nn.Linear(6, 6),
            nn.ReLU(inplace=True),
            nn.Linear(6, 6),
            nn.Identity(),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        return self.last(self.id(self.act(y))) + y


def test_attribute_called_id_compares_nothing() -> None:
    model, x = HasAnId(), torch.rand(2, 6)
    extractor = featx.create_feature_extractor(model, ["output"], example_inputs=x)
    assert torch.equal(extractor(x)["output"], model(x))


def _is_same_object(one: object, other: object) -> bool:
    return one is other


class ComparesElsewhere(nn.Module):
    """Compares its inputs in a function that calls nothing of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return self.linear(a) * 2 if _is_same_object(a, b) else self.linear(a) + self.linear(b).relu()


@pytest.mark.slow
def test_inputs_that_a_function_compares_are_checked() -> None:
    model, x = ComparesElsewhere(), torch.rand(2, 4)
    extractor = featx.create_feature_extractor(model, ["output"], example_inputs=different(x))
    inputs = different(x)
    assert torch.equal(extractor(*inputs)["output"], model(*inputs))
    with pytest.raises(SpecializationError, match="one tensor is passed as two inputs"):
        extractor(x, x)
    with pytest.raises(TraceError, match=r"one tensor as two inputs.*give an example with different ones"):
        featx.create_feature_extractor(model, ["output"], example_inputs=(x, x))


class WritesFirst(nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a.mul_(2)
        return b + 1


def test_inputs_that_are_views_of_one_memory_are_refused_where_one_is_written() -> None:
    x = torch.ones(8)
    extractor = featx.create_feature_extractor(WritesFirst(), ["output"], example_inputs=(x[:4], x[4:]))
    with pytest.raises(SpecializationError, match="views of the same memory"):
        extractor(x[:4], x[2:6])
    assert torch.equal(extractor(x[:4], x[4:])["output"], torch.full((4,), 2.0))


@pytest.mark.slow
def test_inputs_that_are_views_of_one_memory_may_be_compared() -> None:
    x = torch.rand(2, 5)  # as texts and labels, which are the same text one token later
    model = ComparesElsewhere()
    extractor = featx.create_feature_extractor(model, ["output"], example_inputs=different(x[:, 1:]))
    inputs = x[:, :-1], x[:, 1:]
    assert torch.equal(extractor(*inputs)["output"], model(*inputs))


class ComparesResult(nn.Module):
    """Tests whether a call has returned its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.contiguous()
        return self.linear(x) if _is_same_object(x, y) else x


def test_result_that_a_function_compares_with_the_input_is_refused() -> None:
    with pytest.raises(TraceError, match="may use `is` to test whether a call returned its input"):
        featx.create_feature_extractor(ComparesResult(), ["output"], example_inputs=torch.rand(2, 4))


class UsesIsForNothing(nn.Module):
    """Compares with `is`, and does the same in both cases."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.contiguous()
        if y is x:
            y = y
        return self.linear(y)


def test_comparison_on_which_nothing_depends_is_no_obstacle() -> None:
    model, x = UsesIsForNothing(), torch.rand(2, 4)
    extractor = featx.create_feature_extractor(model, ["output"], example_inputs=x)
    assert torch.equal(extractor(x)["output"], model(x))


class ComparesClasses(nn.Module):
    """Compares classes and dtypes with `is`, beside a layer that returns its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.last = nn.Linear(4, 4), nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h: Any = self.linear(x)
        size = h.shape[1]
        if type(size) is int and h.dtype is torch.float32 and None is not h and tuple is not h.__class__:
            size = (size, size)
        return self.last(h * size[0])


def test_a_comparison_of_classes_compares_no_tensors() -> None:
    model, x = ComparesClasses(), torch.rand(2, 3, 4)
    extractor = featx.create_feature_extractor(model, ["last"], example_inputs=torch.rand(3, 5, 4))
    assert torch.equal(extractor(x)["last"], model(x))


class ComparesBehindDropout(nn.Module):
    """A dropout layer returns its input in eval mode, and a new tensor in train mode."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(4, 4), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x)
        y = self.drop(h)
        return y * 2 if y is h else y


@pytest.mark.slow
def test_result_of_a_dropout_layer_that_is_compared_with_its_input_is_refused() -> None:
    for model in (ComparesBehindDropout(), ComparesBehindDropout().eval()):
        with pytest.raises(TraceError, match="may use `is` to test whether a call returned its input"):
            featx.create_feature_extractor(model, ["output"], example_inputs=torch.rand(2, 4))


CONVERSIONS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda x: x.contiguous(),
    lambda x: x.float(),
    lambda x: x.to(torch.float32),
    lambda x: x.type_as(torch.zeros(1)),
    lambda x: torch.as_tensor(x, dtype=torch.float32),
]


class ComparesConverted(nn.Module):
    def __init__(self, convert: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.convert = convert

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        converted = self.convert(x)
        return x + 1 if converted is x else converted * 2


class TakesOneOfTwo(ComparesConverted):
    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        converted = self.convert(x) + 1
        return converted if converted is not mask else x


def to_be_copied(convert: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return an input of which the conversion makes a copy."""
    x = torch.rand(3, 4, dtype=torch.float64).t()
    return x if convert(x) is not x else x.float()


@pytest.mark.parametrize("convert", CONVERSIONS)
def test_copy_that_is_compared_with_what_it_was_made_of_is_refused(
    convert: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    with pytest.raises(TraceError, match="may use `is` to test whether a call returned its input"):
        featx.trace(ComparesConverted(convert), to_be_copied(convert))


@pytest.mark.parametrize("convert", CONVERSIONS)
def test_copy_that_is_compared_with_something_else_is_followed(
    convert: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    model, example = TakesOneOfTwo(convert), to_be_copied(convert)
    traced = featx.trace(model, example)
    for x in (example, torch.rand(5, 2, dtype=example.dtype)):
        assert torch.equal(traced(x), model(x))


class Box:
    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.y = x, y


def test_tensors_in_an_object_that_are_one_are_noticed() -> None:
    class Comparing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.tensor(0.0))

        def forward(self, box: Box) -> torch.Tensor:
            if box.x is box.y:
                self.calls.add_(1)
                return box.x * 2
            return box.y

    one, other = torch.rand(3, 4), torch.rand(3, 4)
    traced = featx.trace(Comparing(), Box(one, other))
    assert torch.equal(traced(Box(other, one)), one)
    with pytest.raises(featx.SpecializationError, match="one tensor is passed as two inputs"):
        traced(Box(one, one))
    traced = featx.trace(Comparing(), Box(one, one))
    assert torch.equal(traced(Box(other, other)), other * 2)
    with pytest.raises(featx.SpecializationError, match="other inputs share one tensor"):
        traced(Box(one, other))


class ReadsReal(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.real
        y += 1
        return x * 2 + y


def test_the_real_part_of_a_real_tensor_is_that_of_a_complex_one() -> None:
    model, x = ReadsReal(), torch.rand(2, 3)
    graph = featx.trace(model, x.clone())
    for value in (x, torch.complex(x, x)):
        assert torch.equal(graph(value.clone()), model(value.clone()))
