"""The images that the command line gives a model are made as the model declares, also with another size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torchvision
from PIL import Image

from featx.cli.errors import UserError
from featx.cli.images import find_images


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    small = torchvision.transforms.functional.to_pil_image(torch.rand(3, 12, 16))
    small.resize((400, 300)).save(tmp_path / "photo.png")
    return tmp_path / "photo.png"


def made(photo: Path, model: Any, spec: str, size: int | None) -> torch.Tensor:
    return find_images([photo], model, size, spec=spec).read([photo])[0]


@pytest.mark.parametrize("size", [None, 224, 96])
def test_of_timm(photo: Path, size: int | None) -> None:
    model = timm.create_model("vit_tiny_patch16_224", pretrained=False, depth=1)
    config = {**timm.data.resolve_model_data_config(model), "input_size": (3, size or 224, size or 224)}
    expected = timm.data.create_transform(**config, is_training=False)(Image.open(photo))
    assert config["mean"] == (0.5, 0.5, 0.5)
    assert torch.equal(made(photo, model, "timm:vit_tiny_patch16_224", size), expected)


@pytest.mark.parametrize(("size", "resized"), [(None, 256), (112, 128)])
def test_of_torchvision(photo: Path, size: int | None, resized: int) -> None:
    weights = torchvision.models.ResNet18_Weights.DEFAULT
    expected = weights.transforms(crop_size=size or 224, resize_size=resized)(Image.open(photo))
    assert torch.equal(made(photo, torchvision.models.resnet18(), "torchvision:resnet18", size), expected)


@pytest.mark.slow
def test_a_detector_gets_squares_that_are_not_normalized(photo: Path) -> None:
    """Its own transform leaves each image as large as it is, and the model normalizes."""
    model = torchvision.models.detection.fasterrcnn_mobilenet_v3_large_320_fpn(weights=None, weights_backbone=None)
    image = made(photo, model, "torchvision:fasterrcnn_mobilenet_v3_large_320_fpn", 96)
    assert image.shape == (3, 96, 96)
    assert 0 <= image.min() < image.max() <= 1


@pytest.mark.slow
@pytest.mark.parametrize("size", [None, 64])
@pytest.mark.parametrize("kind", ["ViTImageProcessor", "CLIPImageProcessor"])
def test_of_transformers(photo: Path, tmp_path: Path, kind: str, size: int | None) -> None:
    transformers = pytest.importorskip("transformers")
    getattr(transformers, kind)().save_pretrained(tmp_path / "model")
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path / "model")
    image, options = Image.open(photo), dict[str, Any]()
    if size is not None:
        square = {"height": size, "width": size}
        options = {"size": square} if kind.startswith("ViT") else {"size": {"shortest_edge": size}, "crop_size": square}
    expected = processor(image, return_tensors="pt", **options)["pixel_values"][0]
    assert expected.shape == (3, size or 224, size or 224)
    assert torch.equal(made(photo, None, f"hf:{tmp_path / 'model'}", size), expected)


@pytest.mark.slow
def test_side_of_a_model_of_transformers_without_a_processor(photo: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = transformers.ViTModel(transformers.ViTConfig(**sizes, image_size=32, patch_size=8))
    text = transformers.BertModel(transformers.BertConfig(**sizes, vocab_size=50))
    for each, name in ((model, "images"), (text, "text")):  # the name of no folder would be looked for on the network
        each.save_pretrained(tmp_path / name)
    assert made(photo, model, f"hf:{tmp_path / 'images'}", None).shape == (3, 32, 32)
    with pytest.raises(UserError, match="BertModel takes no images"):
        made(photo, text, f"hf:{tmp_path / 'text'}", None)
