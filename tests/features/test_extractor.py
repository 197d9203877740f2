"""create_feature_extractor: values of the untouched model, bit for bit, by forward hooks with a clone.

Where torchvision's own extractor is wrong, the test says so by running it too.
"""

from __future__ import annotations

import copy
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


# -- 1. submodules that are really called conv_1, conv_2, conv ---------------------------------------------------------


class Numbered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv_1 = nn.Conv2d(3, 3, 1)
        self.conv_2 = nn.Conv2d(3, 3, 1)
        self.conv = nn.Conv2d(3, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(self.conv_2(self.conv_1(x)))


@pytest.mark.parametrize("name", ["conv_1", "conv_2", "conv"])
def test_1_submodule_called_like_a_repeated_call_is_found_by_its_name(name: str, capture: Capture) -> None:
    model, x = Numbered(), image()
    expected = capture(model, [name], x)[name][0]
    assert torch.equal(run(featx.create_feature_extractor(model, [name]), x)[name], expected)
    other = theirs.create_feature_extractor(model, [name])
    assert not torch.equal(run(other, x)[name], expected), "torchvision gives another layer's tensor"


def small_vit(layers: int = 12) -> nn.Module:
    """torchvision's vit_b_16 with narrow layers."""
    return torchvision.models.VisionTransformer(
        image_size=32, patch_size=16, num_layers=layers, num_heads=2, hidden_dim=16, mlp_dim=16, num_classes=4
    ).eval()


@pytest.mark.slow
def test_1_ln_1_of_a_vit_is_not_ln_2(capture: Capture) -> None:
    model, x, name = small_vit(2), image(), "encoder.layers.encoder_layer_0.ln_1"
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-1, 1)
    expected = capture(model, [name], x)[name][0]
    assert torch.equal(run(featx.create_feature_extractor(model, {name: "ln"}), x)["ln"], expected)
    other = run(theirs.create_feature_extractor(model, {name: "ln"}), x)["ln"]
    assert not torch.equal(other, expected), "torchvision returns the output of ln_2"


# -- 2. an in-place call whose result nobody reads ---------------------------------------------------------------------


class InPlace(nn.Module):
    def __init__(self, write: Callable[[Any], Any]) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 3, 1)
        self.second = nn.Conv2d(3, 3, 1)
        self.write = write

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        self.write(x)
        return self.second(x)


def set_item(x: Any) -> None:
    x[:, 0] = 1


WRITES: dict[str, Callable[[Any], Any]] = {
    "add_": lambda x: x.add_(1),
    "set item": set_item,
    "relu_": lambda x: torch.relu_(x),
    "relu in place": lambda x: torch.nn.functional.relu(x, inplace=True),
    "method relu_": lambda x: x.relu_(),
}


@pytest.mark.parametrize("name", WRITES)
def test_2_write_whose_result_nobody_reads_stays(name: str, capture: Capture) -> None:
    model, x = InPlace(WRITES[name]), image()
    with torch.no_grad():
        expected = capture(model, ["second"], x)["second"][0]
        assert torch.equal(run(featx.create_feature_extractor(model, ["second"]), x)["second"], expected)
        if name == "set item":
            with pytest.raises(TypeError, match="item assignment"):  # torchvision cannot
                theirs.create_feature_extractor(model, ["second"])
            return
        other = run(theirs.create_feature_extractor(model, ["second"]), x)["second"]
    assert not torch.equal(other, expected), "torchvision drops the write"


def test_2_module_in_place_whose_result_nobody_reads_stays(capture: Capture) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.relu, self.second = nn.Conv2d(3, 3, 1), nn.ReLU(inplace=True), nn.Conv2d(3, 3, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            self.relu(x)
            return self.second(x)

    model, x = Model(), image()
    expected = capture(model, ["second"], x)["second"][0]
    assert torch.equal(run(featx.create_feature_extractor(model, ["second"]), x)["second"], expected)


# -- 3. values that are overwritten ------------------------------------------------------------------------------------


def overwriting() -> nn.Module:
    model = nn.Sequential()
    model.add_module("conv", nn.Conv2d(3, 4, 1))
    model.add_module("bn", nn.BatchNorm2d(4))
    model.add_module("relu", nn.ReLU(inplace=True))
    return model


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("names", [["bn"], ["bn", "relu"], ["conv", "bn", "relu"]], ids=" ".join)
def test_3_value_that_is_overwritten_is_the_one_that_was_computed(
    names: list[str], training: bool, capture: Capture
) -> None:
    model, x = overwriting().train(training), image()
    expected = capture(model, names, x)
    result = run(featx.create_feature_extractor(copy.deepcopy(model), names), x)
    assert list(result) == names
    assert all(torch.equal(result[name], expected[name][0]) for name in names)
    if "relu" in names:
        other = run(theirs.create_feature_extractor(copy.deepcopy(model), names), x)
        assert not torch.equal(other["bn"], expected["bn"][0]), "torchvision returns what relu wrote"


@pytest.mark.slow
def test_3_sum_that_resnet_overwrites_is_the_sum(capture: Capture) -> None:
    model, x = torchvision.models.resnet18().eval(), image(1, 64)
    expected = capture(model, ["layer1.0.relu", "layer1.0.bn2"], x)
    names = ["layer1.0.bn2", "layer1.0.add", "layer1.0.relu_1"]
    result = run(featx.create_feature_extractor(model, names), x)
    assert torch.equal(result["layer1.0.bn2"], expected["layer1.0.bn2"][0])
    assert torch.equal(result["layer1.0.add"], expected["layer1.0.relu input"][1])
    assert torch.equal(result["layer1.0.relu_1"], expected["layer1.0.relu"][1])


# -- 4. keys and names -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_4_two_requested_names_of_one_node_give_two_keys() -> None:
    model, x = torchvision.models.resnet18().eval(), image(1)
    request = {"layer1": "a", "layer1.1.relu_1": "b", "layer1.1": "c"}
    result = run(featx.create_feature_extractor(model, request), x)
    assert set(result) == {"a", "b", "c"}
    assert torch.equal(result["a"], result["b"])
    assert set(run(theirs.create_feature_extractor(model, request), x)) != {"a", "b", "c"}, "torchvision loses keys"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["layer.", "layer1..", "layer1.0.relu_.", "layer1.0.r.lu"])
def test_4_names_are_never_patterns(name: str) -> None:
    model = torchvision.models.resnet18()
    with pytest.raises(featx.NodeNameError, match="No node"):
        featx.create_feature_extractor(model, [name])
    other = theirs.create_feature_extractor(model, [name])
    assert name not in run(other.eval(), image(1)), "torchvision matches a pattern and returns nothing for it"


@pytest.mark.slow
def test_4_request_that_matches_nothing_raises_with_close_matches(unchanged: Unchanged) -> None:
    model = torchvision.models.resnet18().train()
    model.bn1.eval()
    check = unchanged(model)
    with pytest.raises(featx.NodeNameError) as caught:
        featx.create_feature_extractor(model, {"layer4.1.relu2": "x"})
    assert "'layer4.1.relu2' in ResNet." in str(caught.value)
    assert "Did you mean 'layer4.1.relu" in str(caught.value)
    assert isinstance(caught.value, (KeyError, ValueError))
    check()


# -- 5. and 6. the model and the arguments are as before ---------------------------------------------------------------


def test_5_frozen_batch_norm_stays_frozen(unchanged: Unchanged) -> None:
    model, other = overwriting().train(), overwriting().train()
    model.bn.eval()
    other.bn.eval()
    check = unchanged(model)
    featx.create_feature_extractor(model, ["relu"])
    check()
    theirs.create_feature_extractor(other, ["relu"])
    assert other.bn.training, "torchvision thaws it"


@pytest.mark.slow
def test_5_model_with_hooks_and_gradients_is_as_before(unchanged: Unchanged) -> None:
    model = torchvision.models.resnet18().eval()
    model.layer1[0].conv1.register_forward_hook(lambda *_: None)
    model(image(1)).sum().backward()
    check = unchanged(model)
    gradient = model.conv1.weight.grad
    featx.create_feature_extractor(model, ["layer2"])
    check()
    assert model.conv1.weight.grad is gradient


def test_6_arguments_of_the_caller_are_not_changed() -> None:
    options: dict[str, Any] = {"leaf_modules": [nn.Conv2d], "autowrap_functions": []}
    request = {"relu": "a", "bn": "b"}
    model = overwriting()
    featx.create_feature_extractor(model, None, request, request, options)
    assert options == {"leaf_modules": [nn.Conv2d], "autowrap_functions": []}
    assert request == {"relu": "a", "bn": "b"}
    theirs_options: dict[str, Any] = {}
    theirs.create_feature_extractor(model, ["relu"], tracer_kwargs=theirs_options)
    assert theirs_options, "torchvision writes its defaults into them"


# -- 7. asserts do not keep dead blocks alive --------------------------------------------------------------------------


def blocks_that_run(extractor: nn.Module, x: torch.Tensor) -> int:
    ran: list[str] = []
    for name, module in extractor.named_modules():
        if name.endswith("self_attention"):
            module.register_forward_pre_hook(lambda *_, name=name: ran.append(name))
    extractor(x)
    return len(ran)


@pytest.mark.slow
def test_7_vit_cut_at_block_5_runs_six_blocks(capture: Capture) -> None:
    model, x, name = small_vit(), image(1), "encoder.layers.encoder_layer_5"
    expected = capture(model, [name], x)[name][0]
    extractor = featx.create_feature_extractor(copy.deepcopy(model), [name])
    assert torch.equal(run(extractor, x)[name], expected)
    assert blocks_that_run(extractor, x) == 6
    other = theirs.create_feature_extractor(copy.deepcopy(model), [name])
    assert blocks_that_run(other, x) > 6, "torchvision keeps blocks for their asserts"


def test_7_check_of_the_image_size_still_holds() -> None:
    extractor = featx.create_feature_extractor(small_vit(2), ["encoder.layers.encoder_layer_0"])
    with pytest.raises(featx.SpecializationError, match="dimension 2 of input 'x'"):
        extractor(image(1, 48))
    extractor = featx.create_feature_extractor(small_vit(2), ["encoder.layers.encoder_layer_0"], tracer="symbolic")
    with pytest.raises(AssertionError, match="image height"):
        extractor(image(1, 48))


# -- 8. modes (round trips are in test_dual) ---------------------------------------------------------------------------


@pytest.mark.slow
def test_8_extractor_follows_the_mode_of_the_model_and_switches(capture: Capture) -> None:
    model = torchvision.models.mobilenet_v3_small().train()
    extractor = featx.create_feature_extractor(copy.deepcopy(model), ["features.6", "classifier.2"])
    x = image(2)
    for mode in (True, False, True):
        torch.manual_seed(0)
        expected = capture(model.train(mode), ["features.6", "classifier.2"], x)
        # In train mode the statistics move, and so they must in both.
        result = run(extractor.train(mode), x)
        assert torch.equal(result["features.6"], expected["features.6"][0])
        assert torch.equal(result["classifier.2"], expected["classifier.2"][0])
        if mode:
            torch.manual_seed(0)
            model(x)


@pytest.mark.slow
def test_8_googlenet_has_its_auxiliary_heads_in_train_mode_alone() -> None:
    model = torchvision.models.googlenet(init_weights=False)
    extractor = featx.create_feature_extractor(
        model, None, ["inception4a", "aux1.fc2"], ["inception4a"], suppress_diff_warning=True
    )
    assert set(run(extractor.train(), image(2, 64))) == {"inception4a", "aux1.fc2"}
    assert set(run(extractor.eval(), image(2, 64))) == {"inception4a"}


# -- 9. weights, state dict, gradients, dtypes, formats, compilers -----------------------------------------------------


def test_9_weights_are_shared_and_unused_ones_are_dropped() -> None:
    model = torchvision.models.resnet18()
    extractor = featx.create_feature_extractor(model, {"layer2": "C3"})
    assert extractor.get_submodule("layer1.0.conv1") is model.layer1[0].conv1
    theirs_ = dict(model.named_parameters())
    ours = dict(extractor.named_parameters())
    assert ours
    assert all(parameter is theirs_[name] for name, parameter in ours.items())
    assert not [name for name in ours if name.startswith(("layer3", "layer4", "fc"))]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v3_small", "shufflenet_v2_x1_0", "densenet121"])
def test_9_keys_of_the_state_dict_are_those_of_the_model(name: str) -> None:
    with torch.device("meta"):
        model = getattr(torchvision.models, name)()
    names = featx.get_graph_node_names(model)[0]
    whole = featx.create_feature_extractor(model, [names[-1]]).state_dict()
    assert list(whole) == list(model.state_dict())
    part = featx.create_feature_extractor(model, [names[len(names) // 2]]).state_dict()
    assert set(part) < set(model.state_dict())


def test_9_literals_of_the_model_are_not_in_the_state_dict() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.conv(x * torch.tensor([1.0, 2.0, 3.0]).view(3, 1, 1))

    model = Model()
    extractor = featx.create_feature_extractor(model, ["conv"])
    assert set(extractor.state_dict()) == set(model.state_dict())
    assert torch.equal(extractor(image())["conv"], model(image()))
    extractor.load_state_dict(model.state_dict())


@pytest.mark.slow
def test_9_gradients_are_those_of_the_model() -> None:
    model = torchvision.models.resnet18().train()
    twin = copy.deepcopy(model)
    x = image(2, 64)
    seen: list[torch.Tensor] = []
    twin.layer2.register_forward_hook(lambda _, args, output: seen.append(output))
    twin(x)
    seen[0].square().sum().backward()
    featx.create_feature_extractor(model, ["layer2"])(x)["layer2"].square().sum().backward()
    theirs_ = dict(twin.named_parameters())
    for name, parameter in model.named_parameters():
        expected = theirs_[name].grad
        assert (parameter.grad is None) == (expected is None), name
        assert expected is None or torch.equal(parameter.grad, expected), name


def test_9_gradients_reach_the_input_through_an_overwritten_value() -> None:
    model, x = overwriting().eval(), image().requires_grad_()
    result = featx.create_feature_extractor(model, ["bn", "relu"])(x)
    result["bn"].sum().backward(retain_graph=True)
    first = x.grad.clone()
    (expected,) = torch.autograd.grad(model.bn(model.conv(x)).sum(), x)
    assert torch.equal(first, expected)


def test_9_double_and_half_precision_follow_the_model(capture: Capture) -> None:
    for dtype in (torch.float64, torch.bfloat16):
        model, x = overwriting().eval(), image().to(dtype)
        extractor = featx.create_feature_extractor(copy.deepcopy(model), ["bn", "relu"]).to(dtype)
        expected = capture(model.to(dtype), ["bn"], x)["bn"][0]
        result = extractor(x)["bn"]
        assert result.dtype is dtype
        assert torch.equal(result, expected)


def test_9_literal_keeps_its_dtype_when_the_weights_change_theirs() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * torch.tensor([0.1, 1.1, 2.1])

    model = Model()
    extractor = featx.create_feature_extractor(copy.deepcopy(model), ["mul"])
    for dtype in (torch.float16, torch.float64):
        x = image(1, 3)[0, 0].to(dtype)
        result, expected = extractor.to(dtype)(x)["mul"], model.to(dtype)(x)
        assert result.dtype is expected.dtype
        assert torch.equal(result, expected)


def test_9_half_of_the_extractor_is_half_of_its_weights() -> None:
    extractor = featx.create_feature_extractor(overwriting(), ["bn"]).half()
    assert {parameter.dtype for parameter in extractor.parameters()} == {torch.float16}


@pytest.mark.slow
def test_9_channels_last_is_kept(capture: Capture) -> None:
    model, x = torchvision.models.resnet18().eval(), image(2, 64).to(memory_format=torch.channels_last)
    model = model.to(memory_format=torch.channels_last)
    expected = capture(model, ["layer1.0.bn1", "layer2"], x)
    result = featx.create_feature_extractor(model, ["layer1.0.bn1", "layer1.0.relu", "layer2"])(x)
    for name in ("layer1.0.bn1", "layer2"):
        assert torch.equal(result[name], expected[name][0])
        assert result[name].is_contiguous(memory_format=torch.channels_last)


def test_9_move_to_another_device_takes_literals_along() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.conv(x + torch.ones(3, 1, 1))

    extractor = featx.create_feature_extractor(Model(), ["conv"], tracer="symbolic").to("meta")
    assert extractor(image().to("meta"))["conv"].device.type == "meta"
