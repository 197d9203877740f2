"""What is given in the wrong place or form is told what to give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import featx

MODEL = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU())
X = torch.rand(1, 3, 8, 8)
ROW = torch.rand(2, 4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: featx.create_feature_extractor(MODEL, ["0"], X), r"inputs are given by name: .*example_inputs="),
        (
            lambda: featx.create_feature_extractor(MODEL, ["0"], example_inputs=[1, 3, 8, 8]),
            r"\[1, 3, 8, 8\] is a shape; give a tensor of it, torch\.rand\(1, 3, 8, 8\)",
        ),
        (
            lambda: featx.create_feature_extractor(MODEL, [featx.Feature("a", pool="avg")]),
            r"got a Feature; say of what it is: \{'layer4': Feature",
        ),
        (
            lambda: featx.create_feature_extractor(MODEL, [featx.Feature("0", pool="avg")]),
            r"got a Feature; say of what it is: \{'0': Feature",
        ),
        (
            lambda: featx.create_feature_extractor(MODEL, [X]),
            r"classes of modules, got a Tensor of shape \(1, 3, 8, 8\)",
        ),
        (
            lambda: featx.create_feature_extractor(MODEL, ["0"], example_inputs={"image": X}),
            r"do not fit forward\(input.*A dict has inputs by name; give one that is an input itself in a tuple",
        ),
        (lambda: featx.cost(MODEL, (1, 3, 8, 8)), r"the input \(1, 3, 8, 8\) is a shape; give a tensor"),
        (lambda: featx.draw(MODEL, "page.html"), r"draw\(\.\.\.\)\.save\('page\.html'\)"),
    ],
)
def test_inputs_in_another_form(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(featx.ArgumentTypeError, match=message):
        call()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("make", [torch.jit.script, lambda model: torch.jit.trace(model, X)], ids=["script", "trace"])
@pytest.mark.parametrize("example", [None, X], ids=["no example", "example"])
def test_model_of_torch_jit(make: Callable[[nn.Module], nn.Module], example: Any) -> None:
    with pytest.raises(featx.ArgumentTypeError, match=r"made by torch\.jit.*script the extractor"):
        featx.create_feature_extractor(make(MODEL), ["0"], example_inputs=example)


def test_model_whose_inputs_are_not_known_asks_for_an_example() -> None:
    class Several(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, first: list[torch.Tensor], second: torch.Tensor) -> torch.Tensor:
            for each in first:
                second = second + self.linear(each)
            return second

    for call in (featx.get_graph_node_names, featx.nodes, lambda model: featx.create_feature_extractor(model, ["add"])):
        with pytest.raises(featx.TraceError, match="not known which inputs Several takes; give example_inputs"):
            call(Several())
    given = ([ROW], ROW)
    assert torch.equal(
        featx.create_feature_extractor(model := Several(), ["add"], example_inputs=given)(*given)["add"], model(*given)
    )


class _Shared(nn.Module):
    """A model that has one module under three names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.again = self.first
        self.blocks = nn.ModuleList([self.first, nn.Linear(4, 4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[1](torch.relu(self.again(x)))


@pytest.mark.parametrize("name", ["again", "blocks.0"])
def test_a_further_name_of_a_module_is_told_from_its_first(name: str) -> None:
    with pytest.raises(featx.NodeNameError, match=f"'{name}' in _Shared: that is the module 'first'.*ask for 'first'"):
        featx.create_feature_extractor(_Shared().eval(), [name])


def test_calls_of_a_layer_that_stands_in_two_places_are_named() -> None:
    relu = nn.ReLU()
    model = nn.Sequential(nn.Linear(4, 4), relu, nn.Linear(4, 4), relu)
    with pytest.raises(featx.NodeNameError, match=r"'3' in Sequential.*the module '1' .* of its calls, '1', '1_1' in"):
        featx.create_feature_extractor(model, ["3"])
    x = torch.rand(2, 4)
    assert torch.equal(featx.create_feature_extractor(model, ["1_1"])(x)["1_1"], model(x))


@pytest.mark.parametrize(
    "describe",
    [
        featx.nodes,
        lambda model: featx.create_backbone(model, strides=(2,)),
        lambda model: featx.create_feature_extractor(model, ["0"]),
        lambda model: featx.create_feature_extractor(model, ["0"], tracer="symbolic"),
        lambda model: featx.get_graph_node_names(model[0]),
    ],
)
def test_lazy_modules_have_to_run_first(describe: Callable[[nn.Sequential], object]) -> None:
    model = nn.Sequential(nn.LazyConv2d(8, 3, stride=2, padding=1)).eval()
    with pytest.raises(featx.TraceError, match=r"^'0?' is a LazyConv2d.*run the model once"):
        describe(model)


class UnusedParameter(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.unused = nn.UninitializedParameter()


def test_a_parameter_that_nothing_uses_need_not_be_initialized() -> None:
    model, x = nn.Sequential(UnusedParameter()).eval(), torch.rand(2, 4)
    assert torch.equal(featx.create_feature_extractor(model, ["0"])(x)["0"], model(x))


def test_an_error_of_the_model_says_on_which_inputs_it_ran() -> None:
    with pytest.raises(RuntimeError, match="to have 3 channels") as caught:
        featx.create_feature_extractor(MODEL, ["0"], example_inputs=torch.rand(1, 5, 8, 8))
    assert caught.value.__notes__ == [
        "Sequential raised this on example_inputs, whose tensors have the shapes (1, 5, 8, 8)"
    ]


class TwoTowers(nn.Module):
    """Runs what it has inputs for, as CLIP does."""

    def __init__(self) -> None:
        super().__init__()
        self.visual, self.text = nn.Linear(4, 4), nn.Linear(6, 4)

    def forward(self, image: torch.Tensor | None = None, text: torch.Tensor | None = None) -> Any:
        seen = self.visual(image) if image is not None else None
        read = self.text(text) if text is not None else None
        return seen, read


class NeedsBoth(nn.Module):
    """Runs with the inputs of both towers alone."""

    def __init__(self) -> None:
        super().__init__()
        self.visual, self.text_model = nn.Linear(4, 4), TextTower()

    def forward(self, pixels: torch.Tensor | None = None, tokens: torch.Tensor | None = None) -> torch.Tensor:
        assert pixels is not None
        return self.visual(pixels) + self.text_model(tokens=tokens)


class TextTower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.first(tokens).relu()


def test_a_tower_that_takes_the_inputs_is_named() -> None:
    model, tokens = NeedsBoth().eval(), torch.rand(2, 6)
    with pytest.raises(AssertionError) as caught:
        featx.create_feature_extractor(model, ["text_model.first"], example_inputs={"tokens": tokens})
    assert "make the extractor of model.text_model" in caught.value.__notes__[-1]
    extractor = featx.create_feature_extractor(model.text_model, ["first"], example_inputs={"tokens": tokens})
    assert torch.equal(extractor(tokens=tokens)["first"], model.text_model.first(tokens))
    with pytest.raises(AssertionError) as caught:
        featx.create_feature_extractor(model, ["text_model.first", "visual"], example_inputs={"tokens": tokens})
    assert len(caught.value.__notes__) == 1


def test_a_module_that_runs_only_with_inputs_that_may_be_left_out_is_told_so() -> None:
    model, image = TwoTowers().eval(), torch.rand(2, 4)
    with pytest.raises(featx.NodeNameError, match=r"where image, text are None.*example_inputs=\{'image': ...\}"):
        featx.create_feature_extractor(model, ["visual"])
    found = featx.create_feature_extractor(model, ["visual"], example_inputs={"image": image})(image)
    assert torch.equal(found["visual"], model.visual(image))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lstm.0", "lstm[0]", "lstm[1][0]"])
def test_the_name_of_a_part_of_a_tuple_says_how_it_is_taken(name: str) -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(4, 3, batch_first=True), nn.Linear(3, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.lstm(x)[0][:, -1])

    model, x = Reads().eval(), torch.rand(2, 5, 4)
    with pytest.raises(featx.NodeNameError, match=r"\{'lstm': Feature\('part', apply=lambda value: value\[0\]\)\}"):
        featx.create_feature_extractor(model, [name])
    request = {"lstm": featx.Feature("part", apply=lambda value: value[0])}
    assert torch.equal(featx.create_feature_extractor(model, request)(x)["part"], model.lstm(x)[0])


@pytest.mark.parametrize("is_annotated", [True, False])
def test_a_list_may_be_the_one_input(is_annotated: bool) -> None:
    class Pathways(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.slow, self.fast = nn.Linear(4, 3), nn.Linear(6, 3)

        def forward(self, pathways: Any) -> torch.Tensor:
            return self.slow(pathways[0]) + self.fast(pathways[1])

    class Annotated(Pathways):
        def forward(self, pathways: list[torch.Tensor], scale: Any = None) -> torch.Tensor:
            return super().forward(pathways)

    model = (Annotated if is_annotated else Pathways)().eval()
    inputs = [torch.rand(2, 4), torch.rand(2, 6)]
    for example in (inputs, (inputs,)):
        extractor = featx.create_feature_extractor(model, ["slow", "output"], example_inputs=example)
        assert torch.equal(extractor(inputs)["output"], model(inputs))


class CannotBeOpened(nn.Module):
    """Reads what its child has assigned, which a graph that calls the child does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.child = Assigns()
        self.layers = nn.ModuleList([nn.Linear(4, 4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](self.child(x)) * self.child.scale


class Assigns(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scale = x.amax()
        return x + self.scale


class Wrapper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = CannotBeOpened()

    def forward(self, *args: Any) -> Any:
        return self.model(*args)


@pytest.mark.parametrize("name", ["layers.0.nowhere", "child.nowhere", "layers.3", "model.layers.3", "nowhere"])
def test_a_name_that_cannot_exist_is_told_ahead_of_what_cannot_be_followed(name: str) -> None:
    with pytest.raises(featx.NodeNameError, match=f"No node '{name}' in Wrapper"):
        featx.create_feature_extractor(Wrapper().eval(), [name], example_inputs=torch.rand(2, 4))


class TakesList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, images: Any) -> torch.Tensor:
        return self.conv(torch.stack(images))


def test_a_list_that_is_taken_for_several_inputs_is_told_of() -> None:
    image = torch.rand(3, 8, 8)
    with pytest.raises(TypeError) as raised:
        featx.create_feature_extractor(TakesList(), ["conv"], example_inputs=[image])
    assert "for one list: ([a, b],)" in "".join(raised.value.__notes__)
    extractor = featx.create_feature_extractor(TakesList(), ["conv"], example_inputs=([image],))
    assert extractor([image])["conv"].shape == (1, 4, 6, 6)


class TakesArray(nn.Module):
    def forward(self, array: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(array) + x


def test_a_list_of_inputs_may_hold_an_array() -> None:
    inputs = [np.ones(3, np.float32), torch.rand(3)]
    extractor = featx.create_feature_extractor(TakesArray(), ["add"], example_inputs=inputs)
    assert torch.equal(extractor(*inputs)["add"], inputs[1] + 1)
