"""Models there and back: the same nodes, names, arguments and meta, and the same values to the last bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.fx
from torch import nn

import featx

torchvision = pytest.importorskip("torchvision")
timm = pytest.importorskip("timm")
from torchvision.models import swin_transformer as swin  # noqa: E402 - after importorskip
from torchvision.models.convnext import CNBlockConfig, ConvNeXt  # noqa: E402
from torchvision.models.efficientnet import EfficientNet, FusedMBConvConfig, MBConvConfig  # noqa: E402
from torchvision.models.feature_extraction import create_feature_extractor  # noqa: E402
from torchvision.models.resnet import Bottleneck, resnet18  # noqa: E402

pytestmark = pytest.mark.sweep

models = torchvision.models
IMAGE = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
VIT = "vit_large_patch16_224"

FULL: dict[str, Callable[[], nn.Module]] = {
    "resnet50": models.resnet50,
    "efficientnet_v2_l": models.efficientnet_v2_l,
    "swin_v2_b": models.swin_v2_b,
    "vit_b_16": models.vit_b_16,
    "densenet201": models.densenet201,
    "convnext_large": models.convnext_large,
    "maxvit_t": models.maxvit_t,
    VIT: lambda: timm.create_model(VIT),
}


def small_efficientnet() -> nn.Module:
    blocks = [FusedMBConvConfig(4, 3, 2, 8, 16, 2), MBConvConfig(4, 3, 2, 16, 24, 2)]
    return EfficientNet(blocks, dropout=0.4, stochastic_depth_prob=0.2, last_channel=32, num_classes=5)


# The same code with fewer and narrower layers.
SMALL: dict[str, Callable[[], nn.Module]] = {
    "resnet50": lambda: models.ResNet(Bottleneck, [1, 2, 1, 1], width_per_group=8, num_classes=5),
    "efficientnet_v2_l": small_efficientnet,
    "swin_v2_b": lambda: swin.SwinTransformer(
        [4, 4], 16, [2, 2], [2, 4], [4, 4], num_classes=5, stochastic_depth_prob=0.2,
        block=swin.SwinTransformerBlockV2, downsample_layer=swin.PatchMergingV2,
    ),
    "vit_b_16": lambda: models.VisionTransformer(32, 16, 2, 2, 32, 64, num_classes=5),
    "densenet201": lambda: models.DenseNet(16, (2, 3, 4, 2), 32, drop_rate=0.1, num_classes=5),
    "convnext_large": lambda: ConvNeXt(
        [CNBlockConfig(16, 32, 2), CNBlockConfig(32, None, 2)], stochastic_depth_prob=0.2, num_classes=5
    ),
    "maxvit_t": lambda: models.MaxVit((32, 32), 8, 2, [8, 16], [1, 1], 4, 0.2, num_classes=5),
    VIT: lambda: timm.create_model(VIT, img_size=32, embed_dim=32, depth=2, num_heads=2, drop_path_rate=0.1),
}  # fmt: skip


def traces(model: nn.Module, image: torch.Tensor) -> Iterator[tuple[featx.GraphModule, featx.Graph]]:
    """Yield modules of each way to trace, with the graphs that they run."""
    for traced in (featx.symbolic_trace(model), followed := featx.trace(model, image)):
        yield traced, traced.graph
    # The calls of modules have one name in both modes.
    names = [node.meta["qualified_name"] for node in followed.graph.find_nodes(op="call_module")]
    extractor = featx.create_feature_extractor(
        model, names[1 :: len(names) // 9], suppress_diff_warning=True, example_inputs=image
    )
    yield extractor, extractor.train_graph
    yield extractor, extractor.eval_graph


@pytest.mark.parametrize("name", FULL)
def test_graphs_of_the_model_come_back_as_they_were(name: str, assert_same: Any) -> None:
    with torch.device("meta"):
        model = FULL[name]().eval()
    for module, graph in traces(model, torch.empty(2, 3, 224, 224, device="meta")):
        converted = featx.to_torch_fx(module, graph=graph)
        assert_same(graph, converted.graph)
        back = featx.from_torch_fx(converted)
        assert_same(graph, back.graph)
        assert back.code == featx.GraphModule(module, graph).code
        for path, submodule in back.named_modules():
            assert submodule.training == model.get_submodule(path).training
            if any(node.target == path for node in graph.find_nodes(op="call_module")):
                assert submodule is model.get_submodule(path)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", SMALL)
def test_values_and_gradients_are_the_same_to_the_last_bit(name: str, training: bool) -> None:
    model = SMALL[name]().train(training)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    for module in (featx.symbolic_trace(model), featx.trace(model, IMAGE)):
        expected = run(model, state, model, IMAGE)
        converted = featx.to_torch_fx(module)
        interpreter = torch.fx.Interpreter(converted)
        for runs in (converted, interpreter.run, featx.from_torch_fx(converted)):
            found = run(model, state, runs, IMAGE)
            assert list(found) == list(expected)
            for key, value in found.items():
                assert torch.equal(value, expected[key]), key


def run(model: nn.Module, state: dict[str, torch.Tensor], forward: Callable[..., Any], *inputs: Any) -> dict[str, Any]:
    """Return the output of `forward`, the gradients and the buffers of `model` after one step."""
    model.load_state_dict(state)
    model.zero_grad()
    torch.manual_seed(3)
    output = forward(*inputs)
    output.square().sum().backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    return {"output": output, **gradients, **{name: buffer.clone() for name, buffer in model.named_buffers()}}


@pytest.mark.parametrize("name", ["resnet50", "swin_v2_b", "efficientnet_v2_l"])
def test_features_are_the_same_to_the_last_bit(name: str) -> None:
    model = SMALL[name]()
    names = featx.get_graph_node_names(model, example_inputs=IMAGE)[0][1::7]
    extractor = featx.create_feature_extractor(model, names, suppress_diff_warning=True, example_inputs=IMAGE)
    for training in (True, False):
        extractor.train(training)
        state = {key: value.clone() for key, value in model.state_dict().items()}
        converted = featx.to_torch_fx(extractor)
        found: list[dict[str, torch.Tensor]] = []
        for runs in (extractor, converted, featx.from_torch_fx(converted)):
            model.load_state_dict(state)
            torch.manual_seed(3)
            found.append(runs(IMAGE))
        for features in found[1:]:
            assert list(features) == names
            assert all(torch.equal(features[key], found[0][key]) for key in names)


def test_model_that_torch_fx_traced_comes_back_as_it_was(assert_same: Any) -> None:
    model = models.resnet18(num_classes=5).eval()
    traced = torch.fx.symbolic_trace(model)
    converted = featx.from_torch_fx(traced)
    assert_same(traced.graph, converted.graph)
    assert torch.equal(converted(IMAGE), model(IMAGE))
    back = featx.to_torch_fx(converted)
    assert_same(traced.graph, back.graph)
    assert back.code == traced.code
    assert back.fc is model.fc


def test_torchvisions_extractor_is_converted() -> None:
    model = resnet18(weights=None).eval()
    x = torch.rand(1, 3, 64, 64)
    extractor = create_feature_extractor(model, ["layer2"])
    assert torch.equal(featx.from_torch_fx(extractor)(x)["layer2"], extractor(x)["layer2"])
