"""Read images as a model takes them: with the transform that it declares, or torch's usual one."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from featx.bulk.decode import decode_image
from featx.bulk.lists import SUFFIXES
from featx.bulk.preprocessing import find_preprocessing
from featx.cli.errors import UserError
from featx.errors import FeatxError, MissingExtraError
from featx.examples import find_example

# Of ImageNet, with which most networks are trained.
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Images:
    """Files of images, and how they are made into what the model takes.

    Attributes:
        files: their paths.
        transform: from an upright RGB image of Pillow to a tensor.
        described: what that does, in words.
    """

    files: Sequence[Path]
    transform: Callable[[Any], torch.Tensor]
    described: str

    def read(self, files: Iterable[Path]) -> torch.Tensor:
        """Return some of the files as one batch. O(files) memory.

        Raises:
            UserError: one is missing or no image.
        """
        return torch.stack([self._read(file) for file in files])

    def _read(self, file: Path) -> torch.Tensor:
        if not file.exists():
            raise UserError(f"there is no file '{file}'")
        try:
            return self.transform(decode_image(file))
        except MissingExtraError:
            raise
        except Exception as error:  # whatever a file that is no image leads Pillow to
            raise UserError(
                f"'{file}' cannot be read as an image: {error}; leave it out, or take `featx extract`, which goes on "
                "with the others"
            ) from error


def find_images(paths: Iterable[Path], model: nn.Module, size: int | None, *, spec: str, pretrained: bool) -> Images:
    """Return the images at `paths`, where folders stand for the images in them.

    They are made as the model declares: timm's data configuration, the transforms of torchvision's weights, the
    processor of transformers; where there is none, or a size is asked for, the middle is scaled, and normalized as for
    ImageNet.

    Raises:
        UserError: there are none.
    """
    files = [file for path in paths for file in _files_of(path)]
    if not files:
        raise UserError(f"no images in {', '.join(map(str, paths))}")
    transform, described = _declared(model, spec, pretrained) if size is None else (None, "")
    if transform is None:
        transform, described = _usual(model, size)
    return Images(files, transform, described)


def _files_of(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    return sorted(each for each in path.iterdir() if each.suffix.lower() in SUFFIXES and each.name[0] != ".")


def _declared(model: nn.Module, spec: str, pretrained: bool) -> tuple[Callable[[Any], torch.Tensor] | None, str]:
    library, _, name = spec.partition(":")
    if library == "timm":
        data: Any = importlib.import_module("timm.data")
        transform = data.create_transform(**data.resolve_model_data_config(model), is_training=False)
        return transform, f"timm's transform: {_in_a_line(transform)}"
    if library == "torchvision" and pretrained:
        models: Any = importlib.import_module("torchvision.models")
        transform = models.get_model_weights(name).DEFAULT.transforms()
        return transform, f"torchvision's transform: {_in_a_line(transform)}"
    if library == "hf":
        transformers: Any = importlib.import_module("transformers")
        try:
            processor = transformers.AutoImageProcessor.from_pretrained(name)
        except (OSError, ValueError):
            return None, ""
        kind = type(processor).__name__
        return lambda image: processor(image, return_tensors="pt")["pixel_values"][0], f"transformers' {kind}"
    return None, ""


def _in_a_line(transform: object) -> str:
    return " ".join(repr(transform).split())


def _usual(model: nn.Module, size: int | None) -> tuple[Callable[[Any], torch.Tensor], str]:
    example = find_example(model) if size is None else None
    shape = example.args[0].shape if example is not None and example.args else torch.Size([1, 3, 224, 224])
    pixels = int(shape[-1]) if size is None else size
    return UsualTransform(pixels), f"{pixels} x {pixels} pixels, the middle, with mean {_MEAN} and deviation {_STD}"


@dataclass(frozen=True)
class UsualTransform:
    """Scales the middle of an image to a square, and normalizes it as for ImageNet."""

    pixels: int

    def __call__(self, image: Any) -> torch.Tensor:
        """Return a tensor of shape (3, pixels, pixels)."""
        pixels, (width, height) = self.pixels, image.size
        longer = pixels * max(width, height) // min(width, height)
        resized = image.resize((pixels, longer) if width < height else (longer, pixels), 3)  # bicubic
        left, top = round((resized.width - pixels) / 2), round((resized.height - pixels) / 2)
        data = bytearray(resized.crop((left, top, left + pixels, top + pixels)).tobytes())
        values = torch.frombuffer(data, dtype=torch.uint8).view(pixels, pixels, 3).permute(2, 0, 1).float() / 255
        return (values - torch.tensor(_MEAN)[:, None, None]) / torch.tensor(_STD)[:, None, None]


def transform_of_model(model: nn.Module, spec: str, size: int | None) -> Callable[[Any], torch.Tensor] | None:
    """Return how a model's images are made, for a job of many; None where the model says it itself, as timm's do.

    Models of torchvision have the transform of their weights. Where nothing is declared, or a size is asked for, it is
    the usual one.
    """
    library, _, name = spec.partition(":")
    if size is not None:
        return UsualTransform(size)
    if library == "torchvision":
        models: Any = importlib.import_module("torchvision.models")
        return models.get_model_weights(name).DEFAULT.transforms()
    try:
        find_preprocessing(model, None)
    except (FeatxError, OSError, ValueError):
        return _usual(model, None)[0]
    return None
