"""Read images as a model takes them: with the transform that it declares, or torch's usual one."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from featx.bulk.samples.decode import decode_image
from featx.bulk.samples.preprocessing import find_preprocessing
from featx.bulk.storage.files import SUFFIXES
from featx.cli.errors import UserError
from featx.errors import FeatxError, MissingExtraError
from featx.examples import find_example
from featx.tree import tensors_in

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
            UserError: one is no image.
        """
        return torch.stack([self._read(file) for file in files])

    def _read(self, file: Path) -> torch.Tensor:
        try:
            return self.transform(decode_image(file))
        except MissingExtraError:
            raise
        except Exception as error:  # whatever a file that is no image leads Pillow to
            raise UserError(
                f"'{file}' cannot be read as an image: {error}; leave it out, or take `featx extract`, which goes on "
                "with the others"
            ) from error


def list_images(paths: Iterable[Path]) -> list[Path]:
    """Return the images at `paths`, where folders stand for the images in them.

    Raises:
        UserError: there are none, or a path is not there.
    """
    files = [file for path in paths for file in _files_of(path)]
    if not files:
        raise UserError(f"no images in {', '.join(map(str, paths))}")
    absent = next((file for file in files if not file.exists()), None)
    if absent is not None:
        raise UserError(f"there is no file '{absent}'")
    return files


def find_images(files: Sequence[Path], model: nn.Module, size: int | None, *, spec: str) -> Images:
    """Return images that are made as the model takes them.

    How is declared by timm's data configuration, the transforms of torchvision's weights, or the processor of
    transformers, each with the size that is asked for. Where nothing is declared, the middle is scaled, and normalized
    as for ImageNet.
    """
    transform, described = _declared(model, spec, size)
    if transform is None:
        transform, described = _usual(model, size)
    return Images(files, transform, described)


def _files_of(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    return sorted(each for each in path.iterdir() if each.suffix.lower() in SUFFIXES and each.name[0] != ".")


def _declared(model: nn.Module, spec: str, size: int | None) -> tuple[Callable[[Any], torch.Tensor] | None, str]:
    library, _, name = spec.partition(":")
    if library == "timm":
        data: Any = importlib.import_module("timm.data")
        config = data.resolve_model_data_config(model)
        if size is not None:
            config["input_size"] = (config["input_size"][0], size, size)
        transform = data.create_transform(**config, is_training=False)
        return transform, f"timm's transform: {_in_a_line(transform)}"
    if library == "torchvision":
        transform = _of_preset(_preset_of(name), model, size)
        return transform, f"torchvision's transform: {_in_a_line(transform)}"
    if library == "hf":
        transformers: Any = importlib.import_module("transformers")
        try:
            processor = transformers.AutoImageProcessor.from_pretrained(name)
        except (OSError, ValueError):
            return None, ""
        return ProcessorOfSize(processor, size), f"transformers' {type(processor).__name__}"
    return None, ""


def _preset_of(name: str) -> Any:
    """Return what makes the transform of torchvision's default weights of a model."""
    models: Any = importlib.import_module("torchvision.models")
    return models.get_model_weights(name).DEFAULT.transforms


def _of_preset(preset: Any, model: nn.Module, size: int | None) -> Callable[[Any], torch.Tensor]:
    """Return torchvision's transform of some weights, for images of this size or of its own.

    Those for segmentation and detection leave the ratio of the sides as it is. Here they get the middle of each image,
    so that all images have one size and make a batch.
    """
    options = {name: each.default for name, each in inspect.signature(preset).parameters.items()}
    crop, resize = options.get("crop_size"), options.get("resize_size")
    if isinstance(crop, int) and isinstance(resize, int):
        # What is cut off stays the same part of the image.
        return preset() if size is None else preset(crop_size=size, resize_size=round(size * resize / crop))
    pixels = size or (resize if isinstance(resize, int) else _side_of_example(model))
    return SquareFirst(pixels, preset(resize_size=pixels) if isinstance(resize, int) else preset())


def _side_of_example(model: nn.Module) -> int:
    example = find_example(model)
    if example is None:
        return 224
    tensors = tensors_in((example.args, example.kwargs))
    if not any(tensor.is_floating_point() for tensor in tensors):
        raise UserError(f"{type(model).__name__} takes no images; featx extract computes features of other data")
    return next((tensor.shape[-1] for tensor in tensors if tensor.dim() == 4), 224)


@dataclass(frozen=True)
class ProcessorOfSize:
    """A processor of transformers for one image of Pillow, with its own size or another one."""

    processor: Any  # as transformers need not be there
    size: int | None

    def __call__(self, image: Any) -> torch.Tensor:
        """Return the pixels, of shape (channels, height, width)."""
        options: dict[str, Any] = {}
        if self.size is not None:
            square = {"height": self.size, "width": self.size}
            is_by_edge = "shortest_edge" in (getattr(self.processor, "size", None) or {})
            options = {"size": {"shortest_edge": self.size} if is_by_edge else square}
            if getattr(self.processor, "crop_size", None):
                options["crop_size"] = square
        return self.processor(image, return_tensors="pt", **options)["pixel_values"][0]


def _in_a_line(transform: object) -> str:
    return " ".join(repr(transform).split())


def _usual(model: nn.Module, size: int | None) -> tuple[Callable[[Any], torch.Tensor], str]:
    pixels = _side_of_example(model) if size is None else size
    return UsualTransform(pixels), f"{pixels} x {pixels} pixels, the middle, with mean {_MEAN} and deviation {_STD}"


def _middle(image: Any, pixels: int) -> Any:
    """Return the middle of an image as a square with sides of so many pixels."""
    width, height = image.size
    longer = pixels * max(width, height) // min(width, height)
    resized = image.resize((pixels, longer) if width < height else (longer, pixels), 3)  # bicubic
    left, top = round((resized.width - pixels) / 2), round((resized.height - pixels) / 2)
    return resized.crop((left, top, left + pixels, top + pixels))


@dataclass(frozen=True)
class SquareFirst:
    """Scales the middle of an image to a square, before another transform."""

    pixels: int
    transform: Callable[[Any], torch.Tensor]

    def __call__(self, image: Any) -> torch.Tensor:
        """Return what the transform makes of the square."""
        return self.transform(_middle(image, self.pixels))


@dataclass(frozen=True)
class UsualTransform:
    """Scales the middle of an image to a square, and normalizes it as for ImageNet."""

    pixels: int

    def __call__(self, image: Any) -> torch.Tensor:
        """Return a tensor of shape (3, pixels, pixels)."""
        data = bytearray(_middle(image, self.pixels).tobytes())
        values = torch.frombuffer(data, dtype=torch.uint8).view(self.pixels, self.pixels, 3).permute(2, 0, 1)
        return (values.float() / 255 - torch.tensor(_MEAN)[:, None, None]) / torch.tensor(_STD)[:, None, None]


def transform_of_model(model: nn.Module, spec: str, size: int | None) -> Callable[[Any], torch.Tensor] | None:
    """Return how a model's images are made, for a job of many; None where the model says it itself, as timm's do.

    Models of torchvision have the transform of their weights. With a size, what is declared is made for it. Where
    nothing is declared, it is the usual one.
    """
    library, _, name = spec.partition(":")
    if size is not None:
        return _declared(model, spec, size)[0] or _usual(model, size)[0]
    if library == "torchvision":
        return _preset_of(name)()
    try:
        find_preprocessing(model, None)
    except (FeatxError, OSError, ValueError):
        return _usual(model, None)[0]
    return None
