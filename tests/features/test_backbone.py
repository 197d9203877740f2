"""create_backbone: maps at strides and after blocks, found in the model."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import torchvision
from torch import nn
from torchvision.models import detection, segmentation
from torchvision.ops import FeaturePyramidNetwork
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool, LastLevelP6P7

import featx

X = torch.rand(2, 3, 64, 96)


@pytest.fixture
def resnet() -> Any:
    torch.manual_seed(0)
    return torchvision.models.resnet18(weights=None).eval()


def hooked(model: nn.Module, *paths: str) -> list[torch.Tensor]:
    """Return what the last call of each module returns, as hooks see it."""
    seen: dict[str, torch.Tensor] = {}
    handles = [
        model.get_submodule(path).register_forward_hook(lambda _, args, output, path=path: seen.update({path: output}))
        for path in paths
    ]
    model(X)
    for handle in handles:
        handle.remove()
    return [seen[path] for path in paths]


def is_equal(found: Any, expected: list[torch.Tensor]) -> bool:
    values = list(found.values()) if isinstance(found, dict) else found
    return len(values) == len(expected) and all(map(torch.equal, values, expected))


# The last map at each stride, read off the source of each model.
FOUND: dict[str, tuple[Callable[[], nn.Module], dict[int, str]]] = {
    "resnet": (lambda: torchvision.models.resnet18(), {8: "layer2", 16: "layer3", 32: "layer4"}),
    "mobilenet": (
        lambda: torchvision.models.mobilenet_v2(),
        {2: "features.1", 4: "features.3", 8: "features.6", 16: "features.13", 32: "features.18"},
    ),
    "vgg": (lambda: torchvision.models.vgg11(), {1: "features.1", 4: "features.9", 32: "features.20"}),
    "convnext": (
        lambda: torchvision.models.convnext_tiny(),
        {4: "features.1", 8: "features.3", 16: "features.5", 32: "features.7"},
    ),
    "regnet": (
        lambda: torchvision.models.regnet_y_400mf(),
        {2: "stem", 4: "trunk_output.block1", 8: "trunk_output.block2", 32: "trunk_output.block4"},
    ),
    "shufflenet": (lambda: torchvision.models.shufflenet_v2_x0_5(), {4: "maxpool", 8: "stage2", 32: "conv5"}),
    "efficientnet": (lambda: torchvision.models.efficientnet_b0(), {8: "features.3", 16: "features.5"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FOUND)
def test_the_last_map_at_each_stride_is_found(name: str) -> None:
    make, paths = FOUND[name]
    torch.manual_seed(0)
    model = make().eval()
    backbone = featx.create_backbone(model, strides=tuple(paths), example_inputs=X)
    expected = hooked(model, *paths.values())
    assert is_equal(backbone(X), expected)
    assert backbone.strides == list(paths)
    assert backbone.channels == [value.shape[1] for value in expected]
    assert list(backbone(X)) == [str(place) for place in range(len(paths))]


@pytest.mark.slow
def test_maps_of_a_model_that_works_with_channels_last() -> None:
    model = torchvision.models.swin_t(weights=None).eval()
    backbone = featx.create_backbone(model, strides=(4, 8, 16), example_inputs=X)
    expected = [value.permute(0, 3, 1, 2) for value in hooked(model, "features.1", "features.3", "features.5")]
    assert is_equal(backbone(X), expected)
    assert backbone.channels == [96, 192, 384]
    last = featx.create_backbone(model, strides=(4,), layout="NHWC", example_inputs=X)
    assert is_equal(last(X), hooked(model, "features.1"))


@pytest.mark.slow
def test_keys_and_the_image_itself(resnet: nn.Module) -> None:
    backbone = featx.create_backbone(resnet, strides={1: "image", 32: "out"})
    found = backbone(X)
    assert list(found) == ["image", "out"]
    assert found["image"] is X
    assert torch.equal(found["out"], *hooked(resnet, "layer4"))
    assert backbone.channels == [3, 512]


@pytest.mark.slow
def test_all_strides_by_default(resnet: nn.Module) -> None:
    backbone = featx.create_backbone(resnet)
    assert backbone.strides == [2, 4, 8, 16, 32]
    assert [info.node for info in backbone.feature_info] == ["relu", "layer1", "layer2", "layer3", "layer4"]


@pytest.mark.slow
def test_a_list_in_place_of_a_dict(resnet: nn.Module) -> None:
    backbone = featx.create_backbone(resnet, strides=(8, 16), as_list=True)
    found = backbone(X)
    assert type(found) is list
    assert is_equal(found, hooked(resnet, "layer2", "layer3"))


@pytest.mark.slow
def test_other_sizes_and_batches(resnet: nn.Module) -> None:
    backbone = featx.create_backbone(resnet, strides=(32,))
    for shape in ((1, 3, 224, 224), (3, 3, 97, 65), (5, 3, 32, 32)):
        x = torch.rand(shape)
        expected = nn.Sequential(*list(resnet.children())[:-2])(x)
        assert torch.equal(backbone(x)["0"], expected)


@pytest.fixture(scope="module")
def vit() -> Any:
    torch.manual_seed(0)
    return torchvision.models.VisionTransformer(
        image_size=48, patch_size=8, num_layers=6, num_heads=2, hidden_dim=24, mlp_dim=32
    ).eval()


def tokens(model: nn.Module, x: torch.Tensor, *numbers: int) -> list[torch.Tensor]:
    layers = [getattr(model.encoder.layers, f"encoder_layer_{number}") for number in numbers]  # type: ignore[union-attr]
    seen: list[torch.Tensor] = []
    handles = [layer.register_forward_hook(lambda _, args, output: seen.append(output)) for layer in layers]
    model(x)
    for handle in handles:
        handle.remove()
    return seen


SQUARE = torch.rand(2, 3, 48, 48)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("blocks", "numbers"), [((1, 3, 5), (1, 3, 5)), (3, (1, 3, 5)), ((-1,), (5,)), (1, (5,)), (None, (1, 2, 3, 5))]
)  # 4 of 6: round(1.5), 3, round(4.5), 6, less one
def test_blocks_of_a_vision_transformer(vit: nn.Module, blocks: Any, numbers: tuple[int, ...]) -> None:
    backbone = featx.create_backbone(vit, blocks=blocks, example_inputs=SQUARE)
    expected = [value[:, 1:].mT.reshape(2, 24, 6, 6) for value in tokens(vit, SQUARE, *numbers)]
    assert is_equal(backbone(SQUARE), expected)
    assert set(backbone.strides) == {8}
    assert backbone.out_channels == 24


@pytest.mark.slow
def test_tokens_and_their_prefix(vit: nn.Module) -> None:
    backbone = featx.create_backbone(
        vit, blocks={2: "mid", 5: "last"}, layout="NLC", prefix_tokens=True, example_inputs=SQUARE
    )
    found = backbone(SQUARE)
    assert list(found) == ["mid", "mid_prefix", "last", "last_prefix"]
    mid, last = tokens(vit, SQUARE, 2, 5)
    assert is_equal(found, [mid[:, 1:], mid[:, :1], last[:, 1:], last[:, :1]])


class BySize(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 2, 2)
        self.stage = nn.Conv2d(4, 6, 2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.relu() if x.shape[-1] > 40 else x.sigmoid()
        return self.stage(self.stem(x))


@pytest.mark.slow
def test_sizes_at_which_the_model_does_something_else() -> None:
    model = BySize().eval()
    large, small = torch.rand(1, 3, 64, 64), torch.rand(2, 3, 32, 32)
    with pytest.raises(featx.SpecializationError, match=r"adaptive=True to .* create_backbone"):
        featx.create_backbone(model, example_inputs=large)(small)
    backbone = featx.create_backbone(model, (2, 4), example_inputs=large, adaptive=True)
    for x in (large, small, large):
        out = backbone(x)
        assert torch.equal(out["1"], model(x))
        assert out["0"].shape[1:] == (4, x.shape[2] // 2, x.shape[3] // 2)


class Pair(nn.Module):
    """A stage that returns its map with the size of it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, 2, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Size]:
        y = self.conv(x) * 2
        return y, y.shape[2:]


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList([Pair(3, 4), Pair(4, 8), Pair(8, 16)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            x, _ = stage(x)
        return x.mean((2, 3))


def test_stages_that_return_more_than_a_map() -> None:
    model = Pairs().eval()
    backbone = featx.create_backbone(model, example_inputs=X)
    assert backbone.strides == [2, 4, 8]
    assert is_equal(backbone(X), [value for value, _ in hooked(model, "stages.0", "stages.1", "stages.2")])  # type: ignore[misc]


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(3, 4, 3, 2, 1), nn.Conv2d(4, 8, 3, 2, 1)
        self.up = nn.ConvTranspose2d(8, 4, 2, 2)
        self.gate = nn.AdaptiveAvgPool2d(8)

    def forward(self, x: torch.Tensor) -> Any:
        a = self.down1(x)
        b = self.down2(a)
        return self.up(b) + a, self.gate(b)


def test_a_model_that_scales_up_again_has_the_last_map_of_a_stride() -> None:
    model = UNet().eval()
    backbone = featx.create_backbone(model, strides=(2, 4), example_inputs=X)
    assert [info.node for info in backbone.feature_info] == ["add", "down2"]
    # 8 x 8 is 8 x 12 pixels of X, but of any other image too.
    with pytest.raises(featx.RequestError, match="no map of stride 8; it has 2, 4"):
        featx.create_backbone(model, strides=(8,), example_inputs=torch.rand(2, 3, 64, 64))


class PooledKeys(nn.Module):
    """A stage with an attention whose keys and values have twice the stride of its queries."""

    def __init__(self, channels: int, width: int, stride: int, product: str) -> None:
        super().__init__()
        self.down, self.keys = nn.Conv2d(channels, width, stride, stride), nn.Conv2d(width, width, 2, 2)
        self.whole, self.product = nn.MultiheadAttention(width, 2), product

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.down(x)
        q, k = x.flatten(2).transpose(1, 2), self.keys(x).flatten(2).transpose(1, 2)
        if self.product == "module":
            y = self.whole(q.transpose(0, 1), k.transpose(0, 1), k.transpose(0, 1))[0].transpose(0, 1)
        elif self.product == "fused":
            y = nn.functional.scaled_dot_product_attention(q, k, k)
        elif self.product == "einsum":
            y = torch.einsum("bnm,bmc->bnc", torch.einsum("bnc,bmc->bnm", q, k).softmax(-1), k)
        else:
            y = torch.bmm((q @ k.mT).softmax(-1), k)
        return x + y.transpose(1, 2).reshape(x.shape)


@pytest.mark.parametrize("product", ["module", "fused", "einsum", "bmm"])
def test_keys_of_a_larger_stride_are_no_maps(product: str) -> None:
    stages = [PooledKeys(*sizes, product) for sizes in ((3, 8, 4), (8, 16, 2), (16, 24, 2))]
    model = nn.Sequential(*stages).eval()
    backbone = featx.create_backbone(model, example_inputs=X)
    assert backbone.strides == [4, 8, 16]
    with torch.no_grad():
        assert is_equal(backbone(X), hooked(model, "0", "1", "2"))


class UNetWithAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(3, 4, 3, 2, 1), nn.Conv2d(4, 8, 3, 2, 1)
        self.up = nn.ConvTranspose2d(8, 4, 2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.down1(x)
        b = self.down2(a)
        tokens = b.flatten(2)
        attended = nn.functional.scaled_dot_product_attention(tokens, tokens, tokens).unflatten(2, b.shape[2:])
        return self.up(attended) + a


def test_the_smallest_map_of_a_model_that_attends_and_scales_up_again_is_found() -> None:
    backbone = featx.create_backbone(UNetWithAttention().eval(), example_inputs=X)
    assert backbone.strides == [2, 4]


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "stride": ({"strides": (3,)}, featx.RequestError, "no map of stride 3; it has 2, 4, 8, 16, 32"),
    "block": ({"blocks": (7,)}, featx.RequestError, "has 5 blocks; there is none of number 7"),
    "too many": ({"blocks": 9}, featx.RequestError, "has 5 blocks, so 9 of them cannot be chosen"),
    "both": ({"strides": (4,), "blocks": (1,)}, featx.RequestError, "give strides or blocks, not both"),
    "none": ({"strides": ()}, featx.RequestError, "strides is empty"),
    "text": ({"strides": "layer4"}, featx.ArgumentTypeError, "strides must be numbers"),
    "name": ({"blocks": ["layer4"]}, featx.ArgumentTypeError, "blocks must be numbers"),
    "key": ({"strides": {4: "a", 8: "a"}}, featx.RequestError, "one key to two maps"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_refused(resnet: nn.Module, name: str) -> None:
    options, kind, message = WRONG[name]
    with pytest.raises(kind, match=message):
        featx.create_backbone(resnet, **options)


def test_a_stride_that_blocks_do_not_have(vit: nn.Module) -> None:
    with pytest.raises(featx.RequestError, match=r"no map of stride 16; it has 8\. Its 6 blocks"):
        featx.create_backbone(vit, strides=(16,), example_inputs=SQUARE)


def test_a_model_without_maps_is_refused() -> None:
    with pytest.raises(featx.RequestError, match="Linear is not known to have maps"):
        featx.create_backbone(nn.Linear(3, 4))


@pytest.mark.sweep
def test_tokens_that_are_not_in_the_order_of_the_image_are_no_maps() -> None:
    model = timm.create_model("hiera_tiny_224").eval()
    with pytest.raises(featx.RequestError, match="not known to be patches of an image"):
        featx.create_feature_extractor(model, {"blocks.3": featx.Feature("a", layout="NCHW")})


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["NCHW", "NHWC", "NLC"])
def test_tokens_of_hiera_are_brought_into_order(layout: Any) -> None:
    model = timm.create_model("hiera_tiny_224").eval()
    images = torch.rand(2, 3, 224, 224)
    backbone = featx.create_backbone(model, strides=(8, 32), layout=layout, example_inputs=images)
    expected = model.forward_intermediates(images, intermediates_only=True, output_fmt="NHWC", coarse=True)
    found = list(backbone(images).values())
    for value, other in zip(found, (expected[1], expected[3]), strict=True):
        other = {"NCHW": other.permute(0, 3, 1, 2), "NHWC": other, "NLC": other.flatten(1, 2)}[layout]
        assert torch.equal(value, other)
    assert backbone.channels == [192, 768]
    assert backbone.strides == [8, 32]
    assert [info.shape for info in backbone.feature_info] == [tuple(value.shape) for value in found]
    assert torch.equal(copy.deepcopy(backbone)(images)["0"], found[0])


@pytest.mark.slow
def test_a_branch_that_sees_a_scaled_image() -> None:
    model = timm.create_model("crossvit_9_240").eval()
    images = torch.rand(2, 3, 240, 240)
    backbone = featx.create_backbone(model, strides=(12, 17), example_inputs=images)
    expected = model.forward_intermediates(images, intermediates_only=True)
    found = list(backbone(images).values())
    assert [tuple(value.shape[2:]) for value in found] == [(20, 20), (14, 14)]
    assert torch.equal(found[0], expected[2])
    assert torch.equal(found[1], expected[5])


# -- training ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
class EndsWithPool(nn.Module):
    """As models of before adaptive pools: the features end with a pool of a fixed window, which moves by one place."""

    def __init__(self, pool: nn.Module, head: nn.Module) -> None:
        super().__init__()
        stages = [nn.Conv2d(3 if i == 0 else 8, 8, 3, 2, 1) for i in range(4)]
        self.features, self.head = nn.Sequential(*stages, pool), head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x).mean((2, 3)))


@pytest.mark.parametrize("pool", [nn.AvgPool2d(4, 1), nn.AvgPool2d((4, 5), 1), nn.Conv2d(8, 8, 4)])
def test_what_a_pool_of_a_fixed_window_leaves_is_no_map(pool: nn.Module) -> None:
    model = EndsWithPool(pool, nn.Linear(8, 2)).eval()
    backbone = featx.create_backbone(model, example_inputs=X).eval()
    assert list(backbone.strides) == [2, 4, 8, 16]
    paths = [f"features.{i}" for i in range(4)]
    assert is_equal(backbone(X), hooked(model, *paths))


def test_freezing_until_a_map(resnet: Any) -> None:
    backbone = featx.create_backbone(resnet, strides=(4, 8, 16)).freeze(until=8).train()
    before = resnet.layer2[0].bn1.running_mean.clone()
    sum(value.sum() for value in backbone(X).values()).backward()
    trained = {name.split(".")[0] for name, value in backbone.named_parameters() if value.grad is not None}
    assert trained == {"layer3"}
    assert torch.equal(resnet.layer2[0].bn1.running_mean, before)
    assert backbone.training
    assert backbone.layer3[0].bn1.training
    assert not backbone.layer2[0].bn1.training


@pytest.mark.slow
def test_unfreezing(resnet: Any) -> None:
    backbone = featx.create_backbone(resnet, strides=(4, 8, 16)).freeze().freeze_batch_norm().train()
    assert not any(module.training for module in backbone.modules() if isinstance(module, nn.BatchNorm2d))
    before = resnet.bn1.running_mean.clone()
    backbone.unfreeze()(X)
    assert all(value.requires_grad for value in backbone.parameters())
    assert not torch.equal(resnet.bn1.running_mean, before)
    backbone.unfreeze().freeze(until=8)
    assert {name.split(".")[0] for name, value in backbone.named_parameters() if value.requires_grad} == {"layer3"}
    assert not backbone.eval().unfreeze().layer3[0].bn1.training


@pytest.mark.slow
@pytest.mark.parametrize("until", ["2", "layer3", 16])
def test_freezing_by_key_name_or_stride(resnet: nn.Module, until: Any) -> None:
    backbone = featx.create_backbone(resnet).freeze(until=until if until != "2" else "3")
    trainable = {name.split(".")[0] for name, value in backbone.named_parameters() if value.requires_grad}
    assert trainable == {"layer4"}


@pytest.mark.slow
def test_freezing_all(resnet: nn.Module) -> None:
    assert not any(value.requires_grad for value in featx.create_backbone(resnet).freeze().parameters())
    with pytest.raises(featx.RequestError, match="no map has stride 3"):
        featx.create_backbone(resnet).freeze(until=3)
    with pytest.raises(featx.NodeNameError, match="No node 'layer9'"):
        featx.create_backbone(resnet).freeze(until="layer9")
    with pytest.raises(featx.RequestError, match=r"'layer1\.0' lies inside 'layer1', which this backbone calls"):
        featx.create_backbone(resnet).freeze(until="layer1.0")


@pytest.mark.slow
def test_frozen_batch_norm(resnet: Any) -> None:
    backbone = featx.create_backbone(resnet, strides=(32,), frozen_batch_norm=True)
    expected = copy.deepcopy(backbone)(X)["0"]
    before = {name: value.clone() for name, value in backbone.named_buffers()}
    assert torch.equal(backbone.train()(X)["0"], expected)
    assert all(torch.equal(value, before[name]) for name, value in backbone.named_buffers())
    names = [name for name, value in backbone.named_parameters() if not value.requires_grad]
    norms = [name for name, module in backbone.named_modules() if isinstance(module, nn.BatchNorm2d)]
    assert {name.rpartition(".")[0] for name in names} == set(norms)
    assert not any(module.training for module in backbone.modules() if isinstance(module, nn.BatchNorm2d))


@pytest.mark.slow
def test_copies_are_backbones(resnet: nn.Module) -> None:
    backbone = featx.create_backbone(resnet, strides=(8, 32), frozen_batch_norm=True)
    for each in (copy.deepcopy(backbone), copy.copy(backbone), pickle.loads(pickle.dumps(backbone))):
        assert each.channels == [128, 512]
        assert is_equal(each.train()(X), list(backbone.eval()(X).values()))


# -- heads ---------------------------------------------------------------------------------------------------------


IMAGES = [torch.rand(3, 64, 96), torch.rand(3, 80, 64)]
TARGETS = [{"boxes": torch.tensor([[4.0, 4.0, 40.0, 40.0]]), "labels": torch.tensor([1])}] * 2


@pytest.mark.slow
def test_torchvisions_detectors_take_it(resnet: nn.Module) -> None:
    backbone = featx.create_backbone(resnet, strides=(4, 8, 16, 32))
    neck = FeaturePyramidNetwork(backbone.channels, 32, LastLevelMaxPool())
    body = backbone.with_neck(neck)
    assert body.out_channels == 32
    detector = detection.FasterRCNN(body, num_classes=3, min_size=64, max_size=96).train()
    sum(detector(IMAGES, TARGETS).values()).backward()
    assert resnet.get_parameter("layer1.0.conv1.weight").grad is not None
    assert torch.equal(neck(backbone.eval()(X))["pool"], body.eval()(X)["pool"])


@pytest.mark.slow
def test_modules_of_a_neck_keep_their_modes(resnet: nn.Module) -> None:
    backbone = featx.create_backbone(resnet, strides=(8, 16))
    neck = FeaturePyramidNetwork(backbone.channels, 32, norm_layer=nn.BatchNorm2d).train()
    neck.inner_blocks.eval()
    before = {name: module.training for name, module in neck.named_modules()}
    backbone.with_neck(neck)
    assert len(set(before.values())) == 2
    assert {name: module.training for name, module in neck.named_modules()} == before


@pytest.mark.slow
def test_torchvisions_retinanet_takes_it(resnet: nn.Module) -> None:
    backbone = featx.create_backbone(resnet, strides=(8, 16, 32))
    body = backbone.with_neck(FeaturePyramidNetwork(backbone.channels, 32, LastLevelP6P7(32, 32)))
    detector = detection.RetinaNet(body, num_classes=3, min_size=64, max_size=96).eval()
    assert [set(each) for each in detector(IMAGES)] == [{"boxes", "scores", "labels"}] * 2


@pytest.mark.slow
def test_one_map_is_a_backbone_of_torchvision(resnet: nn.Module) -> None:
    backbone = featx.create_backbone(resnet, strides=(32,))
    assert backbone.out_channels == 512
    anchors = detection.anchor_utils.AnchorGenerator(((32,),), ((1.0,),))
    pool = torchvision.ops.MultiScaleRoIAlign(["0"], 7, 2)
    detector = detection.FasterRCNN(
        backbone, 3, rpn_anchor_generator=anchors, box_roi_pool=pool, min_size=64, max_size=96
    ).eval()
    assert len(detector(IMAGES)) == 2


@pytest.mark.slow
def test_torchvisions_segmentation_heads_take_it(resnet: nn.Module) -> None:
    backbone = featx.create_backbone(resnet, strides={16: "aux", 32: "out"})
    of_aux, of_out = backbone.channels
    model = segmentation.deeplabv3.DeepLabV3(
        backbone, segmentation.deeplabv3.DeepLabHead(of_out, 5), segmentation.fcn.FCNHead(of_aux, 5)
    ).eval()
    assert {key: tuple(value.shape) for key, value in model(X).items()} == {
        "out": (2, 5, 64, 96), "aux": (2, 5, 64, 96)
    }  # fmt: skip


@pytest.mark.slow
def test_decoders_that_take_a_list(resnet: nn.Module) -> None:
    smp = pytest.importorskip("segmentation_models_pytorch")
    backbone = featx.create_backbone(resnet, strides=(1, 2, 4, 8, 16, 32), as_list=True)
    decoder = smp.decoders.unet.decoder.UnetDecoder(
        encoder_channels=backbone.out_channels, decoder_channels=(32, 16, 8, 8, 8), n_blocks=5
    )
    assert decoder(backbone(X)).shape == (2, 8, 64, 96)


# -- timm and transformers -----------------------------------------------------------------------------------------


@pytest.mark.sweep
@pytest.mark.parametrize(
    "name",
    ["resnet10t", "convnext_atto", "efficientnet_b0", "mobilenetv3_small_050", "regnetx_002", "vgg11", "pit_ti_224",
     "levit_128", "hrnet_w18_small", "mvitv2_tiny", "inception_v3", "twins_pcpvt_small"],
)  # fmt: skip
def test_maps_are_those_of_timm(name: str) -> None:
    torch.manual_seed(0)
    model = timm.create_model(name, pretrained=False).eval()
    x = torch.rand(1, *model.pretrained_cfg["input_size"])
    expected = model.forward_intermediates(x, intermediates_only=True)
    backbone = featx.create_backbone(model, blocks=range(len(expected)))
    assert is_equal(backbone(x), expected)
    assert backbone.strides == [each["reduction"] for each in model.feature_info]
    assert backbone.channels == [each["num_chs"] for each in model.feature_info]


@pytest.mark.sweep
def test_maps_of_tresnet_are_those_of_timm_with_the_strides_that_they_have() -> None:
    model = timm.create_model("tresnet_m", pretrained=False).eval()
    x = torch.rand(1, 3, 64, 64)
    expected = model.forward_intermediates(x, intermediates_only=True)
    backbone = featx.create_backbone(model)
    assert is_equal(backbone(x), expected)
    assert backbone.strides == [64 // value.shape[-1] for value in expected] == [4, 4, 8, 16, 32]
    assert [each["reduction"] for each in model.feature_info] == [2, 4, 8, 16, 32]


def test_a_declared_stride_that_the_shape_of_the_map_contradicts_does_not_count() -> None:
    class Folding(nn.Sequential):
        feature_info = (
            {"module": "1", "reduction": 2, "num_chs": 8},  # 4
            {"module": "2", "reduction": 4, "num_chs": 8},
            {"module": "3", "reduction": 8, "num_chs": 16},
        )

    layers = [nn.PixelUnshuffle(4), nn.Conv2d(48, 8, 3, 1, 1), nn.Conv2d(8, 8, 3, 1, 1), nn.Conv2d(8, 16, 3, 2, 1)]
    model = Folding(*layers).eval()
    backbone = featx.create_backbone(model, example_inputs=X)
    assert [info.node for info in backbone.feature_info] == ["1", "2", "3"]
    assert backbone.strides == [4, 4, 8] == [X.shape[-1] // value.shape[-1] for value in backbone(X).values()]
    assert [info.node for info in featx.create_backbone(model, strides=4, example_inputs=X).feature_info] == ["2"]
    with pytest.raises(featx.RequestError, match=r"has no map of stride 2; it has 4, 8"):
        featx.create_backbone(model, strides=(2, 4), example_inputs=X)


def test_a_declared_stride_counts_where_it_makes_as_many_tokens_as_another_one() -> None:
    class Patches(nn.Module):
        feature_info = (
            {"module": "first", "reduction": 16, "num_chs": 6},
            {"module": "last", "reduction": 64, "num_chs": 8},
        )

        def __init__(self) -> None:
            super().__init__()
            self.patches, self.first, self.last = nn.Conv2d(3, 6, 16, 16), nn.Linear(6, 6), nn.Linear(6, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(self.patches(x).flatten(2).mT)  # 7 x 7 tokens
            places = x.reshape(x.shape[0], 7, 7, 6)[:, ::4, ::4]
            return self.last(places.flatten(1, 2))  # 2 x 2, as a stride of 56 makes of 112 pixels too

    backbone = featx.create_backbone(Patches().eval(), example_inputs=torch.rand(2, 3, 112, 112))
    assert backbone.strides == [16, 64]


@pytest.mark.sweep
def test_tokens_are_those_of_timm() -> None:
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", reg_tokens=3, dynamic_img_size=True, depth=3).eval()
    backbone = featx.create_backbone(model, blocks=(0, 2), prefix_tokens=True)
    x = torch.rand(1, 3, 64, 160)
    (first, prefix), (last, last_prefix) = model.forward_intermediates(
        x, indices=[0, 2], intermediates_only=True, return_prefix_tokens=True
    )
    assert is_equal(backbone(x), [first, prefix, last, last_prefix])
    assert prefix.shape[1] == 4


def transformers_backbone(name: str, **config: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    return getattr(transformers, f"{name}Backbone")(getattr(transformers, f"{name}Config")(**config)).eval()


BACKBONES: dict[str, dict[str, Any]] = {
    "ResNet": {"embedding_size": 8, "hidden_sizes": [8, 16, 24, 32], "depths": [1] * 4, "layer_type": "basic"},
    "ConvNext": {"hidden_sizes": [8, 16, 24, 32], "depths": [1] * 4},
    "Swin": {"embed_dim": 12, "depths": [1] * 4, "num_heads": [1, 2, 2, 2], "image_size": 224},
    "Dinov2": {"hidden_size": 24, "num_hidden_layers": 4, "num_attention_heads": 2, "image_size": 98},
}


@pytest.mark.sweep
@pytest.mark.parametrize("name", BACKBONES)
def test_backbones_of_transformers(name: str) -> None:
    model = transformers_backbone(name, **BACKBONES[name], out_indices=[2, 4])
    x = torch.rand(1, 3, 98, 98) if name == "Dinov2" else torch.rand(1, 3, 224, 224)
    backbone = featx.create_backbone(model)
    assert is_equal(backbone(x), list(model(x).feature_maps))
    assert backbone.channels == model.channels


@pytest.mark.sweep
def test_models_of_transformers_that_declare_nothing() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=24, num_hidden_layers=4, num_attention_heads=2, intermediate_size=32, image_size=64, patch_size=16
    )
    model = transformers.ViTModel(config).eval()
    x = torch.rand(2, 3, 64, 64)
    states = model(x, output_hidden_states=True).hidden_states
    backbone = featx.create_backbone(model, blocks=(1, 2))
    assert is_equal(backbone(x), [each[:, 1:].mT.reshape(2, 24, 4, 4) for each in states[2:4]])


# A class token, with a distillation token, or with four register tokens, before those of 4 x 4 patches.
VISION_TRANSFORMERS: dict[str, tuple[str, dict[str, Any], int]] = {
    "DeiT": ("DeiTModel", {}, 2),
    "CLIP": ("CLIPVisionModel", {}, 1),
    "Siglip": ("SiglipVisionModel", {}, 0),
    "Dinov2": ("Dinov2Model", {}, 1),
    "Dinov2WithRegisters": ("Dinov2WithRegistersModel", {"num_register_tokens": 4}, 5),
    "DINOv3": ("DINOv3ViTModel", {"num_register_tokens": 4}, 5),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", VISION_TRANSFORMERS)
def test_blocks_of_vision_transformers_of_transformers(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    kind, more, prefix = VISION_TRANSFORMERS[name]
    torch.manual_seed(0)
    size = {"hidden_size": 24, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 32}
    config = getattr(transformers, kind.replace("Model", "Config"))(**size, **more, image_size=64, patch_size=16)
    model = getattr(transformers, kind)(config).eval()
    x = torch.rand(2, 3, 64, 64)
    states = model(x, output_hidden_states=True).hidden_states
    backbone = featx.create_backbone(model, blocks=(1, 2), prefix_tokens=True)
    expected = [each[:, prefix:].mT.reshape(2, 24, 4, 4) for each in states[2:4]]
    found = backbone(x)
    assert is_equal([found["0"], found["1"]], expected)
    assert {info.key: info.stride for info in backbone.feature_info if info.key in found.keys() & {"0", "1"}} == {
        "0": 16,
        "1": 16,
    }
    assert not prefix or is_equal([found["0_prefix"], found["1_prefix"]], [each[:, :prefix] for each in states[2:4]])


@pytest.mark.slow
def test_stages_of_transformers_that_a_container_has() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.ConvNextModel(transformers.ConvNextConfig(hidden_sizes=[8, 12, 16, 24], depths=[1] * 4)).eval()
    states = model(X, output_hidden_states=True).hidden_states
    assert is_equal(featx.create_backbone(model, example_inputs=X)(X), list(states[1:]))


class Places(nn.Module):
    """Puts three tokens before those of patches, or after them."""

    def __init__(self, *, ahead: bool) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 8, 8)
        self.cls_token = nn.Parameter(torch.rand(1, 1, 8))
        self.others = nn.Parameter(torch.rand(1, 2, 8))
        self.blocks = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
        self.ahead = ahead

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        own = torch.cat((self.cls_token, self.others), 1).expand(x.shape[0], -1, -1)
        patches = self.patches(x).flatten(2).mT
        return self.blocks(torch.cat((own, patches) if self.ahead else (patches, own), 1))


def test_tokens_behind_those_of_patches_are_no_prefix() -> None:
    model = Places(ahead=True)
    backbone = featx.create_backbone(model, blocks=(2,), example_inputs=X)
    assert is_equal(backbone(X), [model(X)[:, 3:].mT.reshape(2, 8, 8, 12)])
    with pytest.raises(featx.RequestError, match="blocks"):
        featx.create_backbone(Places(ahead=False), blocks=(2,), example_inputs=X)


@pytest.mark.slow
def test_padding_inside_of_blocks_is_no_stage() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.MobileNetV2Model(transformers.MobileNetV2Config(depth_multiplier=0.25)).eval()
    backbone = featx.create_backbone(model, example_inputs=torch.rand(1, 3, 64, 64))
    assert backbone.strides == [2, 4, 8, 16, 32]
    x = torch.rand(2, 3, 64, 64)
    names = [info.node for info in backbone.feature_info]
    seen: dict[str, torch.Tensor] = {}
    for name in names:
        model.get_submodule(name).register_forward_hook(
            lambda module, args, output, name=name: seen.update({name: output.clone()})
        )
    model(x)
    assert is_equal(backbone(x), [seen[name] for name in names])


@pytest.mark.slow
@pytest.mark.parametrize(("side", "patch"), [(100, 14), (72, 16), (64, 16)])
def test_patches_of_an_image_that_has_no_whole_number_of_them(side: int, patch: int) -> None:
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=side, patch_size=patch, depth=3).eval()
    backbone = featx.create_backbone(model)
    assert (backbone.strides, backbone.channels) == ([patch] * 3, [192] * 3)
    x = torch.rand(2, 3, side, side)
    maps = model.forward_intermediates(x, intermediates_only=True)
    assert is_equal(backbone(x), list(maps))


@pytest.mark.slow
def test_blocks_are_not_the_projections_of_an_attention() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.SiglipVisionConfig(
        hidden_size=48, num_hidden_layers=3, num_attention_heads=4, intermediate_size=64, image_size=84, patch_size=14
    )
    backbone = featx.create_backbone(transformers.SiglipVisionModel(config).eval())
    assert [info.node.rpartition(".")[0].rpartition(".")[2] for info in backbone.feature_info] == ["layers"] * 3


class PlainAttention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.softmax, self.dropout = nn.Softmax(-1), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        weights = self.dropout(self.softmax(q @ k.transpose(-1, -2)))
        return x + self.out((weights @ v).transpose(1, 2).flatten(2))


class PlainViT(nn.Module):
    def __init__(self, patch: int) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 32, patch, patch)
        self.blocks = nn.Sequential(*[PlainAttention(32) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(self.patch(x).flatten(2).transpose(1, 2)).mean(1)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "patch"), [(32, 8), (64, 16), (128, 16)])
def test_weights_of_attention_are_no_maps(size: int, patch: int) -> None:
    model, images = PlainViT(patch).eval(), torch.rand(2, 3, size, size)  # as many tokens as a half or a quarter of it
    outputs: list[torch.Tensor] = []
    for block in model.blocks:
        block.register_forward_hook(lambda _, inputs, value: outputs.append(value))
    found = featx.create_backbone(model, example_inputs=images)(images)
    outputs.clear()
    model(images)
    side = size // patch
    expected = [value.transpose(1, 2).unflatten(2, (side, side)) for value in outputs]
    assert all(torch.equal(*pair) for pair in zip(found.values(), expected, strict=True))


def test_a_module_whose_train_is_no_mode_is_told() -> None:
    class Trainer(nn.Module):
        def train(self, trainer: Any = None, **options: Any) -> Any:
            raise AssertionError

    with pytest.raises(featx.ArgumentTypeError, match=r"Trainer.train is no nn.Module.train.* such as model.model"):
        featx.create_feature_extractor(Trainer(), ["x"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["retinanet_resnet50_fpn", "ssdlite320_mobilenet_v3_large", "ssd300_vgg16"])
def test_detection_models_are_told_to_give_their_network(name: str) -> None:
    model = getattr(torchvision.models.detection, name)(weights=None, weights_backbone=None).eval()
    with pytest.raises(featx.RequestError, match=r"create_backbone\(model\.backbone\.(body|features)\)") as caught:
        featx.create_backbone(model)
    path = str(caught.value).partition("create_backbone(model.")[2].rstrip(")")
    assert featx.create_backbone(model.get_submodule(path)).strides[:3] == [2, 4, 8]


def test_a_network_whose_maps_are_as_large_as_the_image_is_asked_for_by_its_stride() -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 3, padding=1)).eval()
    image = torch.rand(1, 3, 16, 16)
    with pytest.raises(featx.RequestError, match="give strides=1"):
        featx.create_backbone(network, example_inputs=image)
    backbone = featx.create_backbone(network, strides=1, example_inputs=image)
    assert torch.equal(backbone(image)["0"], network(image))


@pytest.mark.slow
def test_edits_of_a_backbone(resnet: nn.Module) -> None:
    plain = featx.create_backbone(resnet, strides=(8, 16))(X)
    edited = featx.create_backbone(resnet, strides=(8, 16), edits={"layer2": lambda value: value * 2})(X)
    assert torch.equal(edited["0"], plain["0"] * 2)
    with torch.no_grad():
        expected = dict(resnet.named_modules())["layer3"](plain["0"] * 2)
    assert torch.equal(edited["1"], expected)


class ActivatesOutside(nn.Module):
    """The layers of each stage lie in lists, and forward activates what they return."""

    def __init__(self, activation: Any) -> None:
        super().__init__()
        widths = [3, 8, 16, 32]
        self.convs = nn.ModuleList(nn.Conv2d(a, b, 3, 2, 1) for a, b in itertools.pairwise(widths))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for width in widths[1:])
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = self.activation(norm(conv(x)))
        return x


@pytest.mark.parametrize("activation", [torch.relu, torch.relu_, nn.functional.gelu])
def test_stage_is_the_last_value_also_where_layers_lie_in_lists(activation: Any) -> None:
    torch.manual_seed(0)
    model, x = ActivatesOutside(activation).eval(), torch.rand(1, 3, 64, 64)
    backbone = featx.create_backbone(model, strides=(4, 8))
    assert torch.equal(list(backbone(x).values())[-1], model(x))


# -- necks -------------------------------------------------------------------------------------------------------------


class ToNumber(nn.Module):
    def forward(self, maps: Any) -> float:
        return 3.0


def test_a_backbone_with_a_neck_is_scripted(resnet: nn.Module) -> None:
    backbone = featx.create_backbone(resnet, strides=(8, 16))
    whole = backbone.with_neck(torchvision.ops.FeaturePyramidNetwork(backbone.channels, 4)).eval()
    found = torch.jit.script(whole)(X)
    assert all(torch.equal(found[key], value) for key, value in whole(X).items())


@pytest.mark.parametrize(
    ("neck", "kind", "message"),
    [
        (None, featx.ArgumentTypeError, "neck must be a module"),
        (torchvision.ops.FeaturePyramidNetwork, featx.ArgumentTypeError, "neck must be a module"),
        (ToNumber(), featx.RequestError, "must return maps"),
        (torchvision.ops.FeaturePyramidNetwork([3, 4], 4), featx.RequestError, r"backbone\.channels is \[128, 256\]"),
    ],
    ids=["None", "class", "number", "channels"],
)
def test_a_wrong_neck_is_refused(resnet: nn.Module, neck: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        featx.create_backbone(resnet, strides=(8, 16)).with_neck(neck)
