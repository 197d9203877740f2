"""What backbones and tables say of models that are hard to tell: edited, guessed wrongly, of torch's own stacks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torchvision
from torch import nn

import featx
from featx import Feature

X = torch.rand(2, 3, 64, 64)


@pytest.fixture(scope="module")
def resnet() -> nn.Module:
    return torchvision.models.resnet18(weights=None).eval()


@pytest.mark.parametrize("edit", [nn.Conv2d(64, 64, 1), nn.ReLU(), lambda value: value * 2])
def test_what_comes_behind_an_edit_is_described(edit: Any, resnet: nn.Module) -> None:
    edits = {"layer1": edit}
    extractor = featx.create_feature_extractor(resnet, ["layer2"], edits=edits, example_inputs=X)
    assert (extractor.channels, extractor.strides) == ([128], [8])
    backbone = featx.create_backbone(resnet, strides=(8, 16), edits=edits, example_inputs=X)
    assert backbone.channels == [128, 256]
    pooled = featx.create_feature_extractor(resnet, {"layer2": Feature("c", pool="avg")}, edits=edits, example_inputs=X)
    assert torch.equal(pooled(X)["c"], extractor(X)["layer2"].mean((2, 3)))


@pytest.mark.slow
def test_maps_of_as_many_channels_as_places_have_channels() -> None:
    transformers: Any = pytest.importorskip("transformers")
    config = transformers.LevitConfig(
        image_size=64, hidden_sizes=[16, 24, 32], num_attention_heads=[2, 2, 2], depths=[1, 1, 1], key_dim=[8, 8, 8]
    )
    backbone = featx.create_backbone(transformers.LevitModel(config).eval())
    assert backbone.channels == [2, 4, 8, 16, 24]


@pytest.mark.slow
def test_heads_of_attention_are_no_map() -> None:
    vit = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=2, embed_dim=48, num_heads=3).eval()
    info = featx.create_feature_extractor(vit, ["blocks.0.attn.q_norm", "blocks.0"]).feature_info
    assert [(each.shape, each.layout, each.stride) for each in info] == [
        ((2, 3, 17, 16), None, None),
        ((2, 17, 48), "NLC", 16),
    ]
    with pytest.raises(featx.RequestError, match=r"'blocks.0.attn.q_norm' is not known to have places or channels"):
        featx.create_feature_extractor(vit, {"blocks.0.attn.q_norm": Feature("q", pool="avg")})


@pytest.mark.slow
def test_a_module_that_fused_attention_does_without() -> None:
    vit = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=2, embed_dim=48, num_heads=3).eval()
    words = r"attention is fused there, and does without that module; ask for 'blocks\.1\.attn\.probabilities'"
    with pytest.raises(featx.NodeNameError, match=words):
        featx.create_feature_extractor(vit, ["blocks.1.attn.attn_drop"])
    assert featx.create_feature_extractor(vit, ["blocks.1.attn.probabilities"]) is not None


@pytest.mark.parametrize("until", [nn.ReLU(), 2.5, ["layer1"], True])
def test_freeze_until_what_is_no_place(until: Any, resnet: nn.Module) -> None:
    backbone = featx.create_backbone(resnet, example_inputs=X)
    with pytest.raises(featx.ArgumentTypeError, match="until must be a key of the result, a stride or the name"):
        backbone.freeze(until)


class FoldedByHand(nn.Module):
    """Takes images, and its first layer does not."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(20, 8, 3, 2, 1), nn.Conv2d(8, 16, 3, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        folded = nn.functional.pixel_unshuffle(x, 2)
        return self.two(self.one(torch.cat([folded, folded[:, :8]], 1)))


def test_inputs_that_cannot_be_guessed_are_the_reason() -> None:
    model = FoldedByHand().eval()
    reason = r"it fails on inputs guessed from the first Conv2d \(RuntimeError: .*; give example_inputs"
    with pytest.raises(featx.RequestError, match=r"shapes are not known, as it fails on .*Give example_inputs"):
        featx.create_backbone(model)
    table = featx.nodes(model)
    assert table.note is not None
    assert str(table).endswith(table.note)
    assert "Shapes are not known" in table._repr_html_()
    assert table.__rich__().caption == table.note
    assert re.search(reason, str(table.filter("one")[:1]))
    assert featx.nodes(model, X).note is None
    assert featx.create_backbone(model, example_inputs=X).strides == [4, 8]


@pytest.mark.parametrize("look", [featx.trace, featx.cost, featx.draw, featx.profile])
def test_whoever_looks_into_a_model_says_that_inputs_were_guessed(look: Any) -> None:
    model = FoldedByHand().eval()
    with pytest.raises(featx.TraceError, match=r"FoldedByHand on inputs guessed from the first Conv2d: RuntimeError"):
        look(model)
    with pytest.raises(RuntimeError, match="expected input"):  # of the model, for inputs that were given
        look(model, torch.rand(1, 4, 64, 64))


def test_a_picture_that_cannot_be_written(resnet: nn.Module, tmp_path: Path) -> None:
    with pytest.raises(featx.FeatxError, match=r"none/x.html' cannot be written: No such file or directory"):
        featx.draw(resnet, X).save(tmp_path / "none" / "x.html")


def test_a_table_of_a_model_of_unknown_inputs_says_so() -> None:
    class OfTwo(nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return a + b

    assert featx.nodes(OfTwo()).note == (
        "Shapes are not known, as no inputs for forward(a, b) are known; give example_inputs with which it runs."
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"strides": "8"}, "strides must be numbers"),
        ({"strides": True}, "strides must be numbers"),
        ({"strides": {"out": 8}}, "strides must be numbers"),
        ({"blocks": 1.5}, "blocks must be numbers"),
        ({"layout": "CHW"}, "layout must be one of NCHW, NHWC, NLC"),
    ],
)
def test_arguments_are_checked_ahead_of_a_trace(options: dict[str, Any], words: str) -> None:
    with pytest.raises(featx.ArgumentTypeError, match=words):
        featx.create_backbone(FoldedByHand().eval(), **options)


@pytest.mark.parametrize("factor", [2, 4])
def test_images_that_are_folded_ahead_of_the_first_layer_are_guessed(factor: int) -> None:
    model = nn.Sequential(nn.PixelUnshuffle(factor), nn.Conv2d(3 * factor**2, 8, 3, 2, 1), nn.Conv2d(8, 4, 3, 2, 1))
    assert featx.create_backbone(model.eval()).strides == [2 * factor, 4 * factor]


class OfTorch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches, self.cls_token = nn.Conv2d(3, 32, 8, 8), nn.Parameter(torch.zeros(1, 1, 32))
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        return self.encoder(torch.cat([self.cls_token.expand(len(x), -1, -1), tokens], 1))[:, 0]


@pytest.mark.slow
def test_layers_in_a_stack_of_torch_are_blocks() -> None:
    model, seen = OfTorch().eval(), dict[str, torch.Tensor]()
    backbone = featx.create_backbone(model, blocks=(1, 3), example_inputs=X)
    for path in ("encoder.layers.1", "encoder.layers.3"):
        model.get_submodule(path).register_forward_hook(
            lambda module, args, result, path=path: seen.update({path: result})
        )
    model(X)
    expected = [seen[path][:, 1:].transpose(1, 2).reshape(2, 32, 8, 8) for path in sorted(seen)]
    assert all(map(torch.equal, backbone(X).values(), expected))
    assert "encoder.layers.2" in featx.nodes(model, X).names
