"""create_feature_extractor: used as torchvision's, on many models, and with bad input."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import featx

torchvision = pytest.importorskip("torchvision")
timm = pytest.importorskip("timm")
from torchvision.models import feature_extraction as theirs  # noqa: E402 - after importorskip

Capture = Callable[..., dict[str, list[Any]]]
Unchanged = Callable[[nn.Module], Callable[[], None]]


def image(batch: int = 2, size: int = 32, channels: int = 3, seed: int = 0) -> torch.Tensor:
    return torch.randn(batch, channels, size, size, generator=torch.Generator().manual_seed(seed))


def run(extractor: nn.Module, x: torch.Tensor, seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    return extractor(x.clone())


def overwriting() -> nn.Module:
    model = nn.Sequential()
    model.add_module("conv", nn.Conv2d(3, 4, 1))
    model.add_module("bn", nn.BatchNorm2d(4))
    model.add_module("relu", nn.ReLU(inplace=True))
    return model


def test_signature_is_that_of_torchvision() -> None:
    ours = inspect.signature(featx.create_feature_extractor).parameters
    other = inspect.signature(theirs.create_feature_extractor).parameters
    expected = [(name, item.default, item.kind) for name, item in other.items()]
    assert [(name, item.default, item.kind) for name, item in ours.items()][: len(expected)] == expected
    assert {item.kind for item in list(ours.values())[len(expected) :]} == {inspect.Parameter.KEYWORD_ONLY}


def test_arguments_may_be_given_by_position() -> None:
    extractor = featx.create_feature_extractor(overwriting(), None, ["bn"], {"relu": "out"}, {"leaf_modules": []}, True)
    assert list(run(extractor.train(), image())) == ["bn"]
    assert list(run(extractor.eval(), image())) == ["out"]


@pytest.mark.slow
def test_first_documented_example_of_torchvision() -> None:
    model = torchvision.models.resnet18()
    model = featx.create_feature_extractor(model, {"layer1": "feat1", "layer3": "feat2"})
    out = model(torch.rand(1, 3, 224, 224))
    assert [(k, v.shape) for k, v in out.items()] == [
        ("feat1", torch.Size([1, 64, 56, 56])),
        ("feat2", torch.Size([1, 256, 14, 14])),
    ]


def leaf_function(x: Any) -> int:
    # This would raise a TypeError if traced through
    return int(x)


class LeafModule(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        # This would raise a TypeError if traced through
        int(x.shape[0])
        return torch.nn.functional.relu(x + 4)


class MyModule(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 1, 3)
        self.leaf_module = LeafModule()

    def forward(self, x: Any) -> Any:
        leaf_function(x.shape[0])
        x = self.conv(x)
        return self.leaf_module(x)


def test_second_documented_example_of_torchvision() -> None:
    model = MyModule()
    extractor = featx.create_feature_extractor(
        model,
        return_nodes=["leaf_module"],
        tracer_kwargs={"leaf_modules": [LeafModule], "autowrap_functions": [leaf_function]},
    )
    assert torch.equal(extractor(image())["leaf_module"], model(image()))


def test_functions_and_modules_that_are_wrapped_may_come_as_lists_or_tuples() -> None:
    for kind in (list, tuple):
        options = {"leaf_modules": kind([LeafModule]), "autowrap_functions": kind([leaf_function])}
        assert featx.create_feature_extractor(MyModule(), ["leaf_module"], tracer_kwargs=options)(image())


@pytest.mark.slow
def test_result_has_the_order_of_the_request() -> None:
    model, x = torchvision.models.resnet18().eval(), image(1)
    request = {"layer3": "c", "conv1": "a", "layer1": "b"}
    assert list(featx.create_feature_extractor(model, request)(x)) == ["c", "a", "b"]
    assert list(theirs.create_feature_extractor(model, request)(x)) == ["a", "b", "c"]


@pytest.mark.slow
def test_input_and_function_nodes_can_be_asked_for() -> None:
    model, x = torchvision.models.resnet18().eval(), image(1)
    result = featx.create_feature_extractor(model, ["x", "flatten", "fc"])(x)
    assert torch.equal(result["x"], x)
    assert torch.equal(result["fc"], model(x))
    assert result["flatten"].shape == (1, 512)


def test_values_that_are_not_tensors_can_be_asked_for() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            batch, _, _, width = x.shape
            return x.reshape(batch, -1, width)

    result = featx.create_feature_extractor(Model(), ["getattr", "getitem", "reshape"])(image(2))
    assert result["getattr"] == (2, 3, 32, 32)
    assert result["getitem"] == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("resnet18", 32),
        ("densenet121", 32),
        ("mobilenet_v3_small", 32),
        ("efficientnet_b0", 32),
        ("shufflenet_v2_x1_0", 32),
        ("googlenet", 64),
        ("regnet_y_400mf", 32),
        ("inception_v3", 80),
    ],
)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_middle_and_last_values_are_those_of_the_model(name: str, size: int, training: bool, capture: Capture) -> None:
    options: dict[str, Any] = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
    if name in ("googlenet", "inception_v3"):
        options["aux_logits"] = False
    model = getattr(torchvision.models, name)(**options).train(training)
    paths = {path for path, module in model.named_modules() if not list(module.children())}
    leaves = [node for node in featx.get_graph_node_names(model, None, True)[0] if node in paths]
    wanted = [leaves[len(leaves) // 2], leaves[-1]]
    x = image(2, size)
    expected = capture(model, wanted, x)
    result = run(featx.create_feature_extractor(copy.deepcopy(model), wanted, suppress_diff_warning=True), x)
    assert list(result) == wanted
    assert all(torch.equal(result[node], expected[node][0]) for node in wanted)


@pytest.mark.slow
def test_all_values_of_a_model_can_be_asked_for_at_once(capture: Capture) -> None:
    model, x = torchvision.models.resnet18().train(), image(2, 64)
    names = featx.get_graph_node_names(model)[0]
    paths = {path for path, module in model.named_modules() if path and not list(module.children())}
    expected = capture(model, paths, x)
    result = run(featx.create_feature_extractor(copy.deepcopy(model), names), x)
    assert list(result) == names
    for path in paths:
        calls = expected[path]
        for number, value in enumerate(calls):
            assert torch.equal(result[path if number == 0 else f"{path}_{number}"], value), path


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "resnet10t", "convnext_atto"])
def test_timm_model_gives_its_own_values(name: str, capture: Capture) -> None:
    options = {"img_size": 32} if name.startswith("vit") else {}
    model = timm.create_model(name, num_classes=2, **options).eval()
    path = {"vit_tiny_patch16_224": "blocks.3", "resnet10t": "layer2", "convnext_atto": "stages.1"}[name]
    x = image(1, 32)
    expected = capture(model, [path], x)
    result = run(featx.create_feature_extractor(model, {path: "middle"}), x)
    assert torch.equal(result["middle"], expected[path][0])


@pytest.mark.slow
def test_statistics_of_batch_norm_move_as_in_the_model() -> None:
    model = torchvision.models.resnet18().train()
    twin = copy.deepcopy(model)
    extractor = featx.create_feature_extractor(model, ["fc"])
    for seed in range(2):
        extractor(image(2, seed=seed))
        twin(image(2, seed=seed))
    ours, other = dict(model.named_buffers()), dict(twin.named_buffers())
    assert all(torch.equal(ours[name], other[name]) for name in other)


@pytest.mark.slow
def test_random_draws_under_a_seed_are_those_of_the_model(capture: Capture) -> None:
    model, x = torchvision.models.efficientnet_b0().train(), image(2)
    expected = capture(model, ["features.7", "classifier.0"], x, seed=3)
    result = run(featx.create_feature_extractor(copy.deepcopy(model), ["features.7", "classifier.0"]), x, seed=3)
    assert torch.equal(result["features.7"], expected["features.7"][0])
    assert torch.equal(result["classifier.0"], expected["classifier.0"][0])


@pytest.mark.slow
def test_hooks_on_modules_run_in_the_extractor_once() -> None:
    model, ran = torchvision.models.resnet18().eval(), []
    model.conv1.register_forward_hook(lambda *_: ran.append("conv1"))
    extractor = featx.create_feature_extractor(model, ["layer1"])
    assert ran == []
    extractor(image(1))
    assert ran == ["conv1"]


def test_model_that_takes_several_inputs_and_keywords() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor, y: torch.Tensor, scale: float = 2.0, mask: Any = None) -> torch.Tensor:
            x = self.linear(x) + y * scale
            return x if mask is None else x * mask

    model, x, y = Model(), torch.randn(2, 3), torch.randn(2, 3)
    extractor = featx.create_feature_extractor(model, ["add"])
    assert torch.equal(extractor(x, y)["add"], model(x, y))
    assert torch.equal(extractor(x, y=y, scale=3.0)["add"], model(x, y, 3.0))
    with pytest.raises(featx.TraceError, match="mask"):
        extractor(x, y, mask=y)
    masked = featx.create_feature_extractor(model, ["mul_1"], concrete_args={"mask": featx.PH})
    assert torch.equal(masked(x, y, 2.0, y)["mul_1"], model(x, y, 2.0, y))


@pytest.mark.slow
def test_difference_between_the_modes_is_warned_of_unless_suppressed() -> None:
    model = torchvision.models.googlenet(init_weights=False)
    with pytest.warns(UserWarning, match="eval mode") as caught:
        featx.create_feature_extractor(model, ["inception3a"])
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        featx.create_feature_extractor(model, ["inception3a"], suppress_diff_warning=True)


@pytest.mark.slow
def test_extractor_of_an_extractor(capture: Capture) -> None:
    model, x = torchvision.models.resnet18().eval(), image(1)
    extractor = featx.create_feature_extractor(model, ["layer1", "layer2"])
    again = featx.create_feature_extractor(extractor, ["layer1.1.bn1"])
    assert torch.equal(again(x)["layer1.1.bn1"], capture(model, ["layer1.1.bn1"], x)["layer1.1.bn1"][0])


def test_an_item_of_a_list_is_named_by_its_path() -> None:
    with pytest.raises(featx.NodeNameError, match=r"named by their paths: 'layer1\.0'"):
        featx.create_feature_extractor(torchvision.models.resnet18(), ["layer1[0]"])


# -- bad input ---------------------------------------------------------------------------------------------------------


class Modal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.main, self.auxiliary = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return (self.main(x), self.auxiliary(x)) if self.training else self.main(x)


# What was asked, the error of featx and the built-in error that torchvision raises there, and what the message says.
BAD: dict[str, tuple[dict[str, Any], type[Exception], type[Exception], str]] = {
    "the output": ({"return_nodes": ["logits"]}, featx.NodeNameError, ValueError, "model returns is 'output'"),
    "unknown name": ({"return_nodes": ["mian"]}, featx.NodeNameError, ValueError, "Did you mean 'main'"),
    "unknown name as a key": ({"return_nodes": {"mian": "a"}}, featx.NodeNameError, KeyError, "Modal"),
    "in train but not in eval": ({"return_nodes": ["auxiliary"]}, featx.NodeNameError, ValueError, r"Modal \(eval\)"),
    "empty list": ({"return_nodes": []}, featx.RequestError, ValueError, "empty"),
    "empty dict": ({"return_nodes": {}}, featx.RequestError, ValueError, "empty"),
    "nothing": ({}, featx.RequestError, AssertionError, "nothing was requested"),
    "both": (
        {"return_nodes": ["main"], "train_return_nodes": ["main"], "eval_return_nodes": ["main"]},
        featx.RequestError,
        AssertionError,
        "both were given",
    ),
    "train alone": ({"train_return_nodes": ["main"]}, featx.RequestError, AssertionError, "together"),
    "eval alone": ({"eval_return_nodes": ["main"]}, featx.RequestError, AssertionError, "together"),
    "empty eval": (
        {"train_return_nodes": ["main"], "eval_return_nodes": []},
        featx.RequestError,
        ValueError,
        "eval_return_nodes is empty",
    ),
    "one key for two": ({"return_nodes": {"main": "a", "x": "a"}}, featx.RequestError, ValueError, "key 'a'"),
    "a string": ({"return_nodes": "main"}, featx.ArgumentTypeError, TypeError, "list of node names"),
    "a number": ({"return_nodes": 3}, featx.ArgumentTypeError, TypeError, "list of node names"),
    "unknown option": (
        {"return_nodes": ["main"], "tracer_kwargs": {"leafs": []}},
        featx.ArgumentTypeError,
        TypeError,
        "leaf_modules",
    ),
    "unknown concrete argument": (
        {"return_nodes": ["main"], "concrete_args": {"y": 1}},
        featx.TraceError,
        ValueError,
        "y",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_request_raises_an_error_of_featx_and_leaves_the_model(case: str, unchanged: Unchanged) -> None:
    arguments, kind, builtin, text = BAD[case]
    model = Modal().train()
    model.main.eval()
    check = unchanged(model)
    with pytest.raises(kind, match=text) as caught:
        featx.create_feature_extractor(model, suppress_diff_warning=True, **arguments)
    assert isinstance(caught.value, builtin)
    assert isinstance(caught.value, featx.FeatxError)
    check()


@pytest.mark.parametrize("model", [nn.Linear, torch.relu, None, "resnet50", {"a": nn.ReLU()}])
def test_model_that_is_no_module_is_refused(model: Any) -> None:
    with pytest.raises(featx.ArgumentTypeError, match=r"nn\.Module") as caught:
        featx.create_feature_extractor(model, ["x"])
    assert isinstance(caught.value, TypeError)


def test_model_that_cannot_be_traced_is_refused_with_its_place_and_left_alone(unchanged: Unchanged) -> None:
    class Deciding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Modal()

        def forward(self, x: torch.Tensor) -> Any:
            x = self.inner.main(x)
            return x if x.sum() > 0 else -x

    model = Deciding().train()
    model.inner.eval()
    check = unchanged(model)
    with pytest.raises(featx.TraceError, match=r"Deciding.*x\.sum\(\) > 0") as caught:
        featx.create_feature_extractor(model, ["inner.main"], tracer="symbolic")
    assert __file__ in str(caught.value)
    check()


@pytest.mark.parametrize("name", ["_bound", "_literals", "meta", "train_graph", "_compile", "graph"])
def test_name_that_the_extractor_needs_itself_is_refused(name: str) -> None:
    class Unlucky(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * getattr(self, name)

    model = Unlucky()
    model.register_buffer(name, torch.ones(3))
    with pytest.raises(featx.TargetError, match="rename that attribute"):
        featx.create_feature_extractor(model, ["mul"])


def test_numbers_are_keys_as_with_torchvision() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU()).eval()
    x = torch.rand(2, 3)
    assert list(featx.create_feature_extractor(model, {"0": 0, "1": 1}, example_inputs=x)(x)) == ["0", "1"]
