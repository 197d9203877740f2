"""get_graph_node_names: the names under which the values inside a model can be asked for."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import featx
from featx.features.nodes import warn_of_differences

torchvision = pytest.importorskip("torchvision")
timm = pytest.importorskip("timm")
from torchvision.models import feature_extraction as theirs  # noqa: E402 - after importorskip

Unchanged = Callable[[nn.Module], Callable[[], None]]


def build(name: str) -> nn.Module:
    options = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
    if name.startswith("regnet"):  # computes its widths with tensors
        return getattr(torchvision.models, name)()
    with torch.device("meta"):
        return getattr(torchvision.models, name)(**options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "resnet18",
        "resnet50",
        "densenet121",
        "inception_v3",
        "mobilenet_v3_small",
        "efficientnet_b0",
        "regnet_y_400mf",
        "shufflenet_v2_x1_0",
        "googlenet",
    ],
)
def test_names_are_those_of_torchvision_in_both_modes(name: str) -> None:
    model = build(name)
    expected = theirs.get_graph_node_names(model, suppress_diff_warning=True)
    assert featx.get_graph_node_names(model, suppress_diff_warning=True, tracer="symbolic") == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "resnet10t", "convnext_atto", "poolformer_s12"])
def test_names_of_timm_models_are_those_of_torchvision(name: str) -> None:
    with torch.device("meta"):
        model = timm.create_model(name)
    expected = theirs.get_graph_node_names(model, suppress_diff_warning=True)
    assert featx.get_graph_node_names(model, suppress_diff_warning=True, tracer="symbolic") == expected


def test_signature_is_that_of_torchvision() -> None:
    ours = inspect.signature(featx.get_graph_node_names).parameters
    other = inspect.signature(theirs.get_graph_node_names).parameters
    expected = [(name, item.default, item.kind) for name, item in other.items()]
    assert [(name, item.default, item.kind) for name, item in ours.items()][: len(expected)] == expected
    assert {item.kind for item in list(ours.values())[len(expected) :]} == {inspect.Parameter.KEYWORD_ONLY}


def decide(x: torch.Tensor) -> torch.Tensor:
    return x if bool(x.sum() > 0) else -x


class Unruly(nn.Module):
    """Cannot be traced through."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.sum() > 0 else x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)
        self.norm = nn.BatchNorm2d(4)
        self.unruly = Unruly()

    def forward(self, x: torch.Tensor, flag: int = 1) -> torch.Tensor:
        x = decide(self.unruly(self.norm(self.conv(x))))
        for _ in range(flag):
            x = functional.relu(x)
        return x / math.sqrt(x.shape[1])


OPTIONS: dict[str, Any] = {"leaf_modules": [Unruly], "autowrap_functions": [decide]}


def test_leaf_modules_and_autowrapped_functions_are_one_name_each() -> None:
    train_names, eval_names = featx.get_graph_node_names(Model(), dict(OPTIONS), concrete_args={"flag": 2})
    assert train_names == eval_names
    assert train_names == theirs.get_graph_node_names(Model(), dict(OPTIONS), concrete_args={"flag": 2})[0]
    assert [name for name in train_names if name in ("unruly", "decide", "relu", "relu_1", "sqrt")] == [
        "unruly",
        "decide",
        "relu",
        "relu_1",
        "sqrt",
    ]


def test_arguments_may_be_given_by_position() -> None:
    assert featx.get_graph_node_names(Model(), dict(OPTIONS), True, {"flag": 1})[0][-1] == "truediv"


def test_modules_of_torchvision_ops_are_leaves() -> None:
    class Squeeze(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.excite = torchvision.ops.SqueezeExcitation(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.excite(x)

    assert featx.get_graph_node_names(Squeeze())[0] == ["x", "excite"]


class ModeDependent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.main = nn.Linear(3, 3)
        self.auxiliary = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return (self.main(x), self.auxiliary(x)) if self.training else self.main(x)


def test_difference_between_the_modes_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="eval mode"):
        train_names, eval_names = featx.get_graph_node_names(ModeDependent())
    assert train_names == ["x", "main", "auxiliary"]
    assert eval_names == ["x", "main"]


@pytest.mark.parametrize(
    ("train_names", "eval_names", "relation"),
    [
        (["a", "b", "c"], ["a", "c"], "of eval mode are a part of those of train mode"),
        (["a", "c"], ["a", "b", "c"], "of train mode are a part of those of eval mode"),
        (["a", "b"], ["b", "a"], "differ"),
        (["a", "b"], ["a", "c"], "differ"),
    ],
)
def test_warning_says_how_the_modes_differ(train_names: list[str], eval_names: list[str], relation: str) -> None:
    with pytest.warns(UserWarning, match=relation):
        warn_of_differences(train_names, eval_names)


def test_warning_points_at_the_line_of_the_caller() -> None:
    with pytest.warns(UserWarning, match="eval mode") as caught:
        featx.get_graph_node_names(ModeDependent())
    assert caught[0].filename == __file__


def test_nothing_is_warned_of_where_it_is_suppressed_or_the_modes_are_alike() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        featx.get_graph_node_names(ModeDependent(), suppress_diff_warning=True)
        featx.get_graph_node_names(nn.Sequential(nn.Linear(3, 3), nn.Dropout()))


def frozen_model() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Dropout())
    model.train()
    model[1].eval()  # as people freeze batch norm
    return model


def test_listing_names_leaves_the_mode_of_each_submodule(unchanged: Unchanged) -> None:
    model, other = frozen_model(), frozen_model()
    check = unchanged(model)
    featx.get_graph_node_names(model)
    check()
    theirs.get_graph_node_names(other)
    assert other[1].training, "torchvision thaws the frozen layer"


def test_failing_to_list_names_leaves_the_mode_of_each_submodule(unchanged: Unchanged) -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = frozen_model()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.inner(x)
            return x if x.sum() > 0 or self.training else -x

    model = Broken().eval()
    model.inner[0].train()
    check = unchanged(model)
    with pytest.raises(featx.TraceError):
        featx.get_graph_node_names(model, tracer="symbolic")
    check()
    with pytest.raises(torch.fx.proxy.TraceError):
        theirs.get_graph_node_names(model)
    assert model.training, "torchvision leaves the model in train mode"


def test_options_of_the_caller_are_not_changed() -> None:
    ours, other = {"leaf_modules": [Unruly]}, {"leaf_modules": [Unruly]}
    model = nn.Sequential(Unruly())
    featx.get_graph_node_names(model, ours)
    assert ours == {"leaf_modules": [Unruly]}
    theirs.get_graph_node_names(model, other)
    assert other != {"leaf_modules": [Unruly]}, "torchvision adds its own"


@pytest.mark.parametrize("model", [nn.Linear, lambda x: x, None, "resnet50"])
def test_something_that_is_no_module_is_refused(model: Any) -> None:
    with pytest.raises(featx.ArgumentTypeError, match=r"nn\.Module") as caught:
        featx.get_graph_node_names(model)
    assert isinstance(caught.value, TypeError)


def test_unknown_option_is_refused() -> None:
    with pytest.raises(featx.ArgumentTypeError, match=r"leaf_modules.*leaves"):
        featx.get_graph_node_names(nn.Linear(3, 3), {"leaves": [nn.Linear]})


def test_unknown_concrete_argument_is_refused(unchanged: Unchanged) -> None:
    model = frozen_model()
    check = unchanged(model)
    with pytest.raises(featx.TraceError, match="flag"):
        featx.get_graph_node_names(model, concrete_args={"flag": 1})
    check()


def test_inputs_in_the_place_of_options_of_the_tracer_are_named() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4)), torch.rand(2, 4)
    with pytest.raises(featx.ArgumentTypeError, match=r"got a Tensor; give inputs by name: example_inputs="):
        featx.get_graph_node_names(model, x)  # pyright: ignore[reportArgumentType]
