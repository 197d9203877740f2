"""Options that meet: patterns that are none, layouts, prefixes with a dtype, scripts, instance norm."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
import torchvision
from torch import nn
from torch.nn import functional

import featx
from featx import Feature


class Small(nn.Module):
    """Convolutions without padding, as in PyTorch's tutorial."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2, self.pool = nn.Conv2d(3, 6, 5), nn.Conv2d(6, 16, 5), nn.MaxPool2d(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.pool(functional.relu(self.conv2(self.pool(functional.relu(self.conv1(x))))))


def test_strides_without_padding() -> None:
    nodes = ["conv1", "pool", "conv2", "pool_1"]
    extractor = featx.create_feature_extractor(Small().eval(), nodes, example_inputs=torch.rand(2, 3, 32, 32))
    assert extractor.strides == [1, 2, 2, 4]
    layers = nn.Sequential(*(nn.Conv2d(8 if number else 3, 8, 3, 2) for number in range(5))).eval()
    found = featx.create_feature_extractor(layers, list("01234"), example_inputs=torch.rand(1, 3, 64, 64))
    assert found.strides == [2, 4, 8, 16, 32]


@pytest.mark.slow
def test_strides_that_timm_declares_where_the_deepest_map_has_one_place() -> None:
    model = timm.create_model("inception_v3", pretrained=False).eval()
    found = featx.create_backbone(model, example_inputs=torch.rand(1, 3, 96, 96))
    assert found.strides == [info["reduction"] for info in model.feature_info] == [2, 4, 8, 16, 32]


@pytest.mark.slow
def test_a_map_of_one_place_is_a_stage_where_it_grows_with_the_image() -> None:
    model = torchvision.models.resnet18(weights=None).eval()
    x = torch.rand(2, 3, 32, 32)
    backbone = featx.create_backbone(model, strides=(8, 32), example_inputs=x)
    stem = model.maxpool(model.relu(model.bn1(model.conv1(x))))
    assert torch.equal(backbone(x)["1"], model.layer4(model.layer3(model.layer2(model.layer1(stem)))))


def test_a_map_of_one_place_has_its_channels_first() -> None:
    class Squeeze(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)  # as many channels as there may be places of 9 pixels

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.conv(x).mean((2, 3), keepdim=True).sigmoid()

    extractor = featx.create_feature_extractor(
        Squeeze().eval(),
        {"sigmoid": [Feature("raw"), Feature("avg", pool="avg")]},
        example_inputs=torch.rand(2, 3, 9, 9),
    )
    assert [info.layout for info in extractor.feature_info] == ["NCHW", "NC"]
    found = extractor(torch.rand(2, 3, 9, 9))
    assert torch.equal(found["avg"], found["raw"].flatten(1))


@pytest.mark.parametrize("layout", ["nchw", "BCHW", "NCWH", "NC HW", 4, "NNCC", "NHW"])
def test_layouts_that_are_none(layout: Any) -> None:
    with pytest.raises(featx.ArgumentTypeError, match="of_layout has N, C and the places"):
        Feature("k", of_layout=layout, pool="avg")


@pytest.mark.parametrize("pattern", ["layer[4-1]", "layer[^]"])
def test_patterns_that_are_none(pattern: str) -> None:
    with pytest.raises(featx.RequestError, match="is no pattern of names"):
        featx.create_feature_extractor(Small().eval(), [pattern], example_inputs=torch.rand(1, 3, 32, 32))


@pytest.mark.parametrize("key", [Feature("c", pool="avg"), ["c", "d"]])
def test_inputs_take_no_features(key: Any) -> None:
    model, x = Small().eval(), torch.rand(1, 3, 32, 32)
    with pytest.raises(featx.ArgumentTypeError, match="for 'conv1' there can be no Feature"):
        featx.create_feature_extractor(model, ["pool_1"], inputs={"conv1": key}, example_inputs=x)


def test_prefix_tokens_have_the_dtype_of_their_feature_and_script() -> None:
    model = timm.create_model("vit_tiny_patch16_224", pretrained=False, img_size=32, depth=1).eval()
    wanted = {"blocks.0": Feature("k", prefix_tokens="apart", detach=True, dtype=torch.float16)}
    extractor = featx.create_feature_extractor(model, wanted, example_inputs=torch.rand(1, 3, 32, 32)).eval()
    x = torch.rand(2, 3, 32, 32)
    found = extractor(x)
    assert {value.dtype for value in found.values()} == {torch.float16}
    assert not any(value.requires_grad for value in found.values())
    scripted = torch.jit.script(extractor)(x)
    assert all(torch.equal(scripted[key], value) for key, value in found.items())


def test_frozen_batch_norm_leaves_instance_norm() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.InstanceNorm2d(8, affine=True), nn.BatchNorm2d(8)).eval()
    x = torch.rand(1, 3, 16, 16)
    backbone = featx.create_backbone(model, strides=(2,), frozen_batch_norm=True, example_inputs=x).train()
    assert isinstance(model[1], nn.InstanceNorm2d)
    assert model[1].weight.requires_grad
    assert not backbone.get_submodule("2").training


class Turned(nn.Module):
    """Has tokens in another order of its dimensions than samples, tokens and channels."""

    def __init__(self, order: tuple[int, int, int]) -> None:
        super().__init__()
        self.embedding, self.order = nn.Embedding(20, 8), order

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        found = self.embedding(input_ids) * attention_mask[..., None].add(1)
        return found.permute(self.order)


@pytest.mark.parametrize("layout", ["NLC", "NCL", "LNC"])
@pytest.mark.parametrize("pool", ["avg", "max", "cls", "last"])
def test_padding_is_left_out_whatever_the_layout_is(layout: str, pool: Any) -> None:
    order = {"NLC": (0, 1, 2), "NCL": (0, 2, 1), "LNC": (1, 0, 2)}[layout]
    ids, mask = torch.randint(0, 20, (2, 7)), torch.tensor([[0, 1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1]])
    feature = Feature("k", pool=pool, of_layout=layout)
    example = {"input_ids": ids, "attention_mask": mask}
    extractor = featx.create_feature_extractor(Turned(order).eval(), {"output": feature}, example_inputs=example)
    model = extractor.get_submodule("embedding")
    raw = model(ids) * mask[..., None].add(1)
    for row, (values, counts) in enumerate(zip(raw, mask.bool(), strict=True)):
        kept = values[counts]
        expected = {"avg": kept.mean(0), "max": kept.amax(0), "cls": kept[0], "last": kept[-1]}[pool]
        torch.testing.assert_close(extractor(**example)["k"][row], expected)


def test_an_adaptive_extractor_has_a_child_of_the_name_model() -> None:
    class Language(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.head = nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.model(x))

    language = Language().eval()
    extractor = featx.create_feature_extractor(language, ["head"], example_inputs=torch.rand(3, 4), adaptive=True)
    assert extractor.get_submodule("model.0") is language.model[0]
    assert extractor.model is language.model


@pytest.mark.slow
def test_strides_of_a_backbone_are_those_behind_its_edits() -> None:
    model = torchvision.models.resnet18(weights=None).eval()
    edits = {"layer2": lambda value: functional.avg_pool2d(value, 2)}
    assert featx.create_backbone(model, edits=edits).strides == [2, 4, 16, 32, 64]


@pytest.mark.slow
def test_a_batch_norm_that_an_edit_looks_into_cannot_be_frozen() -> None:
    model = timm.create_model("mobilenetv3_small_050", pretrained=False)
    edits = {"bn1.act": lambda value: value * 0.5}
    with pytest.raises(featx.RequestError, match="the batch norm 'bn1' cannot stay in eval mode"):
        featx.create_backbone(model, strides=(8,), frozen_batch_norm=True, edits=edits)
    backbone = featx.create_backbone(model, strides=(8,), edits=edits)
    with pytest.raises(featx.RequestError, match="the batch norm 'bn1' cannot stay in eval mode"):
        backbone.freeze(until=8)
    assert all(parameter.requires_grad for parameter in backbone.parameters())


def test_heads_of_a_signal_are_no_maps() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(6, 24)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
            return functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    nodes = ["view", "permute", "scaled_dot_product_attention", "transpose"]
    extractor = featx.create_feature_extractor(Heads(), nodes, example_inputs=torch.rand(2, 9, 6))
    assert [info.layout for info in extractor.feature_info] == [None] * 4
    with pytest.raises(featx.RequestError, match="is not known to have places or channels"):
        featx.create_feature_extractor(Heads(), {"transpose": Feature(pool="avg")}, example_inputs=torch.rand(2, 9, 6))
