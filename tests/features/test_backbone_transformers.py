"""Backbones of transformers' vision models that declare no stages, against forward hooks."""

from __future__ import annotations

import ast
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import featx

transformers = pytest.importorskip("transformers")

SIDE = 64


def _maps(model: Any, modules: list[str], x: torch.Tensor) -> list[torch.Tensor]:
    """Return what modules return for an image, as NCHW maps, whatever the form of it."""
    seen: list[torch.Tensor] = []

    def keep(module: Any, args: Any, output: Any) -> None:
        seen.append((output[0] if isinstance(output, tuple) else output).clone())

    hooks = [model.get_submodule(path).register_forward_hook(keep) for path in modules]
    with torch.no_grad():
        model(x)
    for hook in hooks:
        hook.remove()
    return [_as_map(value) for value in seen]


def _as_map(value: torch.Tensor) -> torch.Tensor:
    if value.dim() == 4:
        return value
    side = math.isqrt(value.shape[1])
    patches = value[:, value.shape[1] - side * side :]
    return patches.transpose(1, 2).unflatten(2, (side, side))


def _vision_transformer(name: str) -> Any:
    config = getattr(transformers, f"{name}Config")(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=64, image_size=SIDE, patch_size=16
    )
    return getattr(transformers, f"{name}Model")(config).eval()


def _hierarchical(name: str, **options: Any) -> Any:
    config = getattr(transformers, f"{name}Config")(depths=[2, 1, 2, 2], hidden_sizes=[8, 16, 24, 32], **options)
    return getattr(transformers, f"{name}Model")(config).eval()


def _of_windows(name: str, depths: Sequence[int] = (2, 1, 3, 2), **options: Any) -> Any:
    config = getattr(transformers, f"{name}Config")(image_size=SIDE, embed_dim=8, depths=list(depths), **options)
    return getattr(transformers, f"{name}Model")(config).eval()


SWIN = {"num_heads": [1, 2, 2, 2], "window_size": 2}
LAST_OF_ROWS = list(enumerate((1, 0, 2, 1)))
PVT = {"image_size": SIDE, "num_attention_heads": [1, 2, 3, 4]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "strides", "modules"),
    [
        (lambda: _vision_transformer("Data2VecVision"), [16] * 3, [f"encoder.layer.{n}" for n in range(3)]),
        (lambda: _vision_transformer("VitDet"), [16] * 3, [f"encoder.layer.{n}" for n in range(3)]),
        (
            lambda: _hierarchical("PoolFormer"),
            [4, 8, 16, 32],
            [f"encoder.block.{stage}.{last}" for stage, last in enumerate((1, 0, 1, 1))],
        ),
        (
            lambda: _hierarchical("Pvt", **PVT),
            [4, 8, 16, 32],
            [f"encoder.block.{stage}.{last}" for stage, last in enumerate((1, 0, 1, 1))],
        ),
        (
            lambda: _hierarchical("GLPN", num_attention_heads=[1, 2, 3, 4]),
            [4, 8, 16, 32],
            [f"encoder.layer_norm.{n}" for n in range(4)],
        ),
        *(
            (
                lambda name=name: _of_windows(name, **SWIN),
                [4, 8, 16, 32],
                [f"encoder.layers.{n}.blocks.{last}" for n, last in LAST_OF_ROWS],
            )
            for name in ("Swin", "Swinv2", "MaskFormerSwin")
        ),
        *(
            (
                lambda depths=depths: _of_windows("Swin", depths, num_heads=[1, 2, 2][: len(depths)], window_size=2),
                [4, 8, 16][: len(depths)],
                [f"encoder.layers.{n}.blocks.{depth - 1}" for n, depth in enumerate(depths)],
            )
            for depths in ([2, 1], [1, 2, 2])
        ),
        (
            lambda: _of_windows("FocalNet"),
            [4, 8, 16, 32],
            [f"encoder.stages.{n}.layers.{last}" for n, last in LAST_OF_ROWS],
        ),
        (  # its keys and values have twice the stride of its queries
            lambda: transformers.CvtModel(
                transformers.CvtConfig(embed_dim=[8, 16, 24], num_heads=[1, 2, 3], depth=[1, 2, 3])
            ).eval(),
            [4, 8, 16],
            [f"encoder.stages.{n}" for n in range(3)],
        ),
    ],
    ids=[
        "Data2VecVision",
        "VitDet",
        "PoolFormer",
        "Pvt",
        "GLPN",
        "Swin",
        "Swinv2",
        "MaskFormerSwin",
        "Swin2",
        "Swin3",
        "FocalNet",
        "Cvt",
    ],
)
def test_maps_are_those_of_the_last_blocks(model: Any, strides: list[int], modules: list[str]) -> None:
    torch.manual_seed(0)
    model, x = model(), torch.rand(2, 3, SIDE, SIDE)
    backbone = featx.create_backbone(model, example_inputs=x)
    assert backbone.strides == strides
    with torch.no_grad():  # attention has other kernels there
        found = list(backbone(x).values())
    for value, expected in zip(found, _maps(model, modules, x), strict=True):
        assert torch.equal(value, expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ViTMAE", "Hiera"])
def test_a_model_with_one_known_map_is_no_backbone(name: str) -> None:
    """ViTMAE drops patches at random, and the patches of Hiera are in an order of their own."""
    with torch.device("meta"):
        model = getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")()).eval()
    with pytest.raises(featx.RequestError, match=r"has one map that is known, .*; give strides="):
        featx.create_backbone(model)


@pytest.mark.slow
def test_a_backbone_whose_maps_have_other_strides_by_height_and_width_says_how_to_get_them() -> None:
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING["pp_lcnet_v4"]()
    config.out_features = [name for name in config.stage_names if name != "stem"]
    model, x = transformers.AutoBackbone.from_config(config).eval(), torch.rand(1, 3, SIDE, SIDE)
    with pytest.raises(
        featx.RequestError, match=r"one stride in both .* create_feature_extractor\(model, (.*)\)$"
    ) as raised:
        featx.create_backbone(model, example_inputs=x)
    names = ast.literal_eval(str(raised.value).rpartition("model, ")[2].rstrip(")"))
    with torch.no_grad():
        found = featx.create_feature_extractor(model, names, example_inputs=x)(x)
        for value, expected in zip(found.values(), model(x).feature_maps, strict=True):
            assert torch.equal(value, expected)
