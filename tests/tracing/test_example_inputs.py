"""Inputs that are keywords, left out or nested."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from agreement import agree, image, same
from torch import nn

import featx


class Inputs(nn.Module):
    def forward(
        self, x: torch.Tensor, mask: torch.Tensor | None = None, scale: float = 2.0, *, shift: torch.Tensor
    ) -> torch.Tensor:
        if mask is not None:
            x = x * mask
        return x * scale + shift


def test_keyword_only_input_is_an_input_and_what_is_left_out_is_checked() -> None:
    model, shift = Inputs(), image(seed=1)
    traced = featx.trace(model, image(), shift=shift)
    assert same(traced(image(), shift=shift), model(image(), shift=shift))
    with pytest.raises(featx.FeatxError):
        traced(image(), image(seed=2), shift=shift)
    with pytest.raises(featx.FeatxError):
        traced(image(), None, 3.0, shift=shift)
    masked = featx.trace(model, image(), image(seed=2), 3.0, shift=shift)
    assert same(masked(image(), image(seed=4), 3.0, shift=shift), model(image(), image(seed=4), 3.0, shift=shift))
    with pytest.raises(featx.FeatxError):
        masked(image(), shift=shift)


class OnlyKeywords(nn.Module):
    def forward(self, *, x: torch.Tensor, y: torch.Tensor | None = None, **more: torch.Tensor) -> torch.Tensor:
        x = x if y is None else x - y
        return x * 2 + sum((value.sum() for value in more.values()), torch.zeros(()))


@pytest.mark.parametrize("names", ["x", "x y", "x y z", "x z w"])
def test_model_of_keywords_alone_takes_those_of_the_example(names: str) -> None:
    def inputs(seed: int, batch: int = 2) -> dict[str, torch.Tensor]:
        return {name: image(batch, seed=seed + place) for place, name in enumerate(names.split())}

    model = OnlyKeywords()
    traced = featx.trace(model, **inputs(0))
    extractor = featx.create_feature_extractor(model, ["mul"], example_inputs=inputs(0))
    for batch in (2, 5):
        given = inputs(7, batch)
        assert same(traced(**given), model(**given))
        assert same(extractor(**given)["mul"], (given["x"] - given["y"] if "y" in given else given["x"]) * 2)
    with pytest.raises(TypeError, match="positional"):
        traced(image())
    if "z" in names:
        with pytest.raises(featx.SpecializationError, match="the form of input 'more'"):
            traced(**inputs(0), v=image())


class Variadic(nn.Module):
    def forward(self, x: torch.Tensor, /, *others: torch.Tensor, power: int = 2) -> torch.Tensor:
        for other in others:
            x = x - other.mean()
        return x**power


def test_positional_inputs_are_as_many_as_in_the_example() -> None:
    model = Variadic()
    traced = agree(model, (image(), image(seed=1), image(3, seed=2)), (image(5), image(seed=4), image(1, seed=5)))
    with pytest.raises(featx.SpecializationError, match="the form of input"):
        traced(image(), image())
    with pytest.raises(featx.SpecializationError, match="input 'power': 3 now, 2 on the example"):
        traced(image(), image(), image(), power=3)


class Nested(nn.Module):
    def forward(self, xs: list[torch.Tensor], more: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        total = more["pair"][0] * more["pair"][1]
        for x in xs:
            total = total + x.mean(0)
        return total


def test_nested_inputs_are_followed_and_their_form_is_checked() -> None:
    model = Nested()
    more = {"pair": (image(1), image(1, seed=1))}
    traced = featx.trace(model, [image(2), image(3)], more)
    other = [image(4, seed=5), image(4, seed=6)]
    assert same(traced(other, more), model(other, more))
    with pytest.raises(featx.SpecializationError):
        traced([*other, image()], more)


def test_sparse_input_is_followed_and_its_layout_is_checked() -> None:
    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, weights: torch.Tensor) -> torch.Tensor:
            return self.linear(torch.sparse.mm(weights, torch.eye(4)))

    model, weights = Mixing(), torch.rand(4, 4).round()
    traced = featx.trace(model, weights.to_sparse())
    other = torch.rand(4, 4).round().to_sparse()
    assert same(traced(other), model(other))
    with pytest.raises(featx.SpecializationError, match="layout of input 'weights'"):
        traced(weights)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensor_is_refused(layout: torch.layout) -> None:
    rows = torch.nested.nested_tensor([torch.rand(2, 4), torch.rand(3, 4)], layout=layout)
    with pytest.raises(featx.TraceError, match="'input' is a nested tensor"):
        featx.trace(nn.Linear(4, 4), rows)


@pytest.mark.parametrize("is_kept_whole", [False, True])
def test_address_of_a_tensor_is_never_that_of_a_stand_in(is_kept_whole: bool) -> None:
    seen: list[int] = []

    class Looking(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * 2
            seen.append(y.data_ptr())
            return y

    model = nn.Sequential(Looking(), nn.ReLU())
    if is_kept_whole:
        extractor = featx.create_feature_extractor(model, {"1": "out"}, example_inputs=image())
        assert same(extractor(image())["out"], model(image()))
    else:
        with pytest.raises(featx.TraceError, match="data_ptr"):
            featx.trace(Looking(), image())
    assert 0 not in seen


class ByName(nn.Module):
    """Its decorator sets an option by name, as those of transformers do."""

    @staticmethod
    def with_option(forward: Any) -> Any:
        @functools.wraps(forward)
        def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return forward(self, *args, **{"scale": 2.0, **kwargs})

        return run

    @with_option
    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None, scale: float | None = None) -> torch.Tensor:
        return x * (1.0 if scale is None else scale) + (0 if y is None else y)


@pytest.mark.parametrize("options", [{"scale": 3.0}, {"y": torch.ones(2), "scale": 3.0}], ids=["one", "two"])
def test_what_is_given_by_name_is_passed_on_by_name(options: dict[str, Any]) -> None:
    model, x = ByName(), torch.rand(2)
    traced = featx.trace(model, x, **options)
    assert torch.equal(traced(x, **options), model(x, **options))
    given = {**options, "y": options.get("y")}
    assert torch.equal(featx.trace(model, x, **given)(x, **given), model(x, **given))


@pytest.mark.parametrize("entry", [featx.trace, featx.cost])
def test_inputs_under_a_wrong_name_are_told_how_to_be_given(entry: Callable[..., Any]) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(TypeError) as caught:
        entry(model, {"x": torch.rand(2, 4)})
    assert "example_inputs=" in "".join(caught.value.__notes__)


class PassesOn(nn.Module):
    """As a wrapper does, of peft for example."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Scales()

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.inner(*args, **kwargs)


class Scales(nn.Module):
    def forward(
        self, x: torch.Tensor, mask: torch.Tensor | None = None, halves: bool = True, **more: torch.Tensor
    ) -> torch.Tensor:
        x = x if mask is None else x * mask
        return torch.cat([x / 2 if halves else x, *more.values()])


@pytest.mark.parametrize("names", [["x", "mask", "halves"], ["x", "halves", "mask"], ["halves", "x"], ["x", "halves"]])
def test_options_among_the_rest_of_the_keywords_may_stand_anywhere(names: list[str]) -> None:
    model = PassesOn()
    given: dict[str, Any] = {name: False if name == "halves" else image() for name in names}
    traced = featx.trace(model, **given)
    assert same(traced(**given), model(**given))
    del given["halves"]  # the option of the example is the default then
    assert same(traced(**given), model(**given, halves=False))
    with pytest.raises(featx.SpecializationError):
        traced(**given, halves=True)


class TakesInOrder(nn.Module):
    def forward(self, **values: Any) -> torch.Tensor:
        first, second = values.values()
        return first - second * 2


def test_keywords_in_another_order_are_not_put_into_that_of_the_example() -> None:
    model, traced = TakesInOrder(), featx.trace(TakesInOrder(), x=image(), scale=2.0)
    assert same(traced(x=image(), scale=2.0), model(x=image(), scale=2.0))
    with pytest.raises(featx.SpecializationError):
        traced(scale=2.0, x=image())


def test_the_order_of_keywords_is_part_of_the_form() -> None:
    model, first, second = PassesOn(), image(seed=1), image(seed=2)
    traced = featx.trace(model, x=image(), halves=False, first=first, second=second)
    with pytest.raises(featx.SpecializationError):
        traced(x=image(), second=second, first=first)
