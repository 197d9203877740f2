"""`example_inputs` of cost, profile, draw and trace takes what that of an extractor takes."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import featx


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        y = self.conv(x)
        return y if scale is None else y * scale


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "trace": lambda *args, **kwargs: [node.meta.get("shape") for node in featx.trace(*args, **kwargs).graph.nodes],
    "cost": lambda *args, **kwargs: str(featx.cost(*args, **kwargs).module_table(3)),
    "profile": lambda *args, **kwargs: [node.name for node in featx.profile(*args, repeats=1, **kwargs).nodes],
    "draw": lambda *args, **kwargs: featx.draw(*args, **kwargs).html(),
}
X, SCALE = torch.rand(2, 3, 8, 8), torch.rand(2, 1, 1, 1)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(
    ("example", "args"),
    [
        (X, (X,)),
        ((X,), (X,)),
        ([X, SCALE], (X, SCALE)),
        ({"x": X, "scale": SCALE}, (X, SCALE)),
        (UserDict(scale=SCALE, x=X), (X, SCALE)),
    ],
)
def test_forms(function: str, example: Any, args: tuple[torch.Tensor, ...]) -> None:
    run = FUNCTIONS[function]
    assert run(Scaled(), example_inputs=example) == run(Scaled(), *args)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_inputs_in_both_ways_are_refused(function: str) -> None:
    with pytest.raises(featx.ArgumentTypeError, match="not both"):
        FUNCTIONS[function](Scaled(), X, example_inputs=X)


class Undeclared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x, scale=1):  # type: ignore[no-untyped-def]
        return self.conv(x) * scale


class OfList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, images: list[torch.Tensor]) -> list[torch.Tensor]:
        return [self.conv(image) for image in images]


CONTAINERS: list[tuple[Any, tuple[torch.Tensor, ...]]] = [
    ((X,), (X,)),
    ([X], (X,)),
    ((X, SCALE), (X, SCALE)),
    ({"x": X, "scale": SCALE}, (X, SCALE)),
]


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(("container", "args"), CONTAINERS)
@pytest.mark.parametrize("model", [Scaled, Undeclared])
def test_a_container_in_place_of_the_inputs(
    function: str, container: Any, args: tuple[torch.Tensor, ...], model: Callable[[], nn.Module]
) -> None:
    run = FUNCTIONS[function]
    assert run(model(), container) == run(model(), *args)


def test_a_container_in_place_of_the_inputs_of_a_graph() -> None:
    traced = featx.trace(Scaled(), X)
    extractor = featx.create_feature_extractor(Scaled(), ["conv"], example_inputs=X)
    for module in (traced, extractor):
        for container in ((X,), [X], {"x": X}):
            assert str(featx.cost(module, container)) == str(featx.cost(module, X))
            assert len(featx.profile(module, container, repeats=1).nodes) > 0


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_list_that_is_an_input(function: str) -> None:
    run = FUNCTIONS[function]
    assert run(OfList(), [X, X]) == run(OfList(), example_inputs=([X, X],)) == run(OfList(), example_inputs=[X, X])
    assert len(run(OfList(), [X, X])) > 1


def test_a_container_that_the_model_takes_in_no_form_is_told() -> None:
    with pytest.raises(TypeError) as caught:
        featx.cost(Undeclared(), (torch.rand(2, 5, 8, 8),))
    assert "for the tuple as the only input" in caught.value.__notes__[0]
    assert "to have 3 channels, but got 5" in caught.value.__notes__[0]


def test_pictures_of_an_example_by_name() -> None:
    page = featx.draw(Scaled(), example_inputs={"x": X}, thumbnails=True).html()
    assert page == featx.draw(Scaled(), X, thumbnails=True).html()
