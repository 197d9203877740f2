"""How a sample becomes an input: the transform of the user's, or the one that a model declares."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import nn

from featx.bulk.extras import require
from featx.errors import ExtractionError
from featx.fingerprint import fingerprint, without_addresses

_PRESET = "torchvision.transforms._presets.ImageClassification"
# Classes that call their `transforms` in order, and do nothing else. A class of the user's may have the same name.
_COMPOSE = frozenset({"torchvision.transforms.transforms.Compose", "torchvision.transforms.v2._container.Compose"})
_TO_TENSOR = frozenset({"torchvision.transforms.transforms.ToTensor", "timm.data.transforms.MaybeToTensor"})
_NORMALIZE = "torchvision.transforms.transforms.Normalize"
# Modes of PIL's images in which a pixel has bytes, which ToTensor divides by 255.
_MODES_OF_BYTES = frozenset({"L", "LA", "RGB", "RGBA", "CMYK", "YCbCr", "HSV", "LAB"})


@dataclass(frozen=True)
class Preprocessing:
    """What turns a decoded sample into an input of the model.

    Attributes:
        early: runs in the processes that read samples.
        mean: is taken off by the model's process, from inputs of 0 to 255 that are divided by 255.
        std: divides what is left.
        is_declared: whether the model declares it, for images; otherwise it is the user's.
        text: what all this is, for people and to compare jobs.
    """

    early: Callable[[Any], Any]
    text: str
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    is_declared: bool = False

    def late(self, value: torch.Tensor) -> torch.Tensor:
        """Return what the model takes, of a batch that `early` made: bit for bit what ToTensor and Normalize give."""
        if self.mean is None or self.std is None or value.dtype != torch.uint8:
            return value
        shape = (1, -1, 1, 1)
        mean, std = (torch.tensor(each, device=value.device).view(shape) for each in (self.mean, self.std))
        return value.float().div(255).sub(mean).div(std)


def find_preprocessing(model: nn.Module, transform: Callable[[Any], Any] | None) -> Preprocessing:
    """Return the transform of the user's, or what timm or transformers declare for a model.

    Raises:
        ExtractionError: there is none, and the model declares nothing.
    """
    if transform is not None:
        if any(
            base.__module__.startswith("transformers.image_processing")
            for base in cast("type[Any]", type(transform)).__mro__
        ):
            return _of_processor(transform, is_declared=False)
        return _split(transform, text_of(transform))
    config: Any = getattr(model, "pretrained_cfg", None)
    if config:
        data: Any = require("timm.data", "timm declares the transform of this model", "timm")
        found = data.create_transform(**data.resolve_model_data_config(model), is_training=False)
        return replace(_split(found, f"timm's: {text_of(found)}"), is_declared=True)
    name: Any = getattr(getattr(model, "config", None), "_name_or_path", None)
    if name:
        transformers: Any = require("transformers", "transformers declares the processor of this model")
        return _of_processor(transformers.AutoImageProcessor.from_pretrained(name), is_declared=True)
    raise ExtractionError(
        f"{type(model).__name__} does not say how its images are made; give transform=..., such as "
        "weights.transforms() of torchvision, or torch.nn.Identity() for tensors that the model takes as they are; or "
        "load=... for what are no images"
    )


def plain(function: Callable[[Any], Any] | None) -> Preprocessing:
    """Return a transform for samples that are no images: what the user gave, or nothing."""
    return Preprocessing(_itself, "nothing") if function is None else Preprocessing(function, text_of(function))


def text_of(function: object) -> str:
    """Return what names a function or transform, the same in each process: its repr, and a hash of what it does."""
    text = without_addresses(" ".join(repr(function).split()))
    return f"{text} (fingerprint {fingerprint(function)[:12]})"


def _itself(value: Any) -> Any:
    return value


def _of_processor(processor: Any, *, is_declared: bool) -> Preprocessing:
    options = json.dumps(processor.to_dict(), sort_keys=True, default=str)
    return Preprocessing(functools.partial(_processed, processor), f"transformers': {options}", is_declared=is_declared)


def _processed(processor: Any, image: Any) -> torch.Tensor:
    return processor(image, return_tensors="pt")["pixel_values"][0]


def _split(transform: Callable[[Any], Any], text: str) -> Preprocessing:
    """Leave ToTensor and Normalize, at the end of a Compose or of torchvision's preset, to the model's process.

    A quarter of the bytes are moved then. The values are the same bit for bit. What is no image of bytes when it comes
    to ToTensor is finished where it is.
    """
    kind = _class_of(transform)
    if kind == _PRESET:
        preset: Any = transform
        return _left(functools.partial(_resized, preset), functools.partial(_finished, preset), preset, text)
    steps: Any = getattr(transform, "transforms", None)
    if kind not in _COMPOSE or len(cast("list[Any]", steps)) < 2:
        return Preprocessing(transform, text)
    *first, to_tensor, normalize = cast("list[Any]", steps)
    if _class_of(to_tensor) not in _TO_TENSOR or _class_of(normalize) != _NORMALIZE:
        return Preprocessing(transform, text)
    last = functools.partial(_in_order, [to_tensor, normalize])
    return _left(functools.partial(_in_order, first), last, normalize, text)


def _class_of(transform: object) -> str:
    return f"{type(transform).__module__}.{type(transform).__qualname__}"


def _left(first: Callable[[Any], Any], rest: Callable[[Any], Any], normalized: Any, text: str) -> Preprocessing:
    """Return what runs `first`, and leaves the rest, which normalizes as `normalized` says, to the model's process."""
    try:
        mean, std = (tuple(float(each) for each in values) for values in (normalized.mean, normalized.std))
    except TypeError:  # one number for all channels
        mean, std = (), ()
    if not std or 0.0 in std:  # torchvision raises for each image where it would divide by 0
        return Preprocessing(functools.partial(_in_order, [first, rest]), text)
    return Preprocessing(functools.partial(_to_bytes, first, rest, (len(mean), len(std))), text, mean, std)


def _in_order(steps: list[Callable[[Any], Any]], image: Any) -> Any:
    for step in steps:
        image = step(image)
    return image


def _to_bytes(
    first: Callable[[Any], Any], rest: Callable[[Any], Any], normalized: tuple[int, int], image: Any
) -> torch.Tensor:
    """Return the bytes of an image; `rest` finishes one without bytes, or with other channels than are `normalized`."""
    image = first(image)
    if getattr(image, "mode", None) not in _MODES_OF_BYTES or not {1, len(image.getbands())}.issuperset(normalized):
        return rest(image)
    functional: Any = require("torchvision.transforms.functional", "torchvision made this transform", "torchvision")
    return functional.pil_to_tensor(image)


def _resized(preset: Any, image: Any) -> Any:
    functional: Any = require("torchvision.transforms.functional", "torchvision made this transform", "torchvision")
    resized = functional.resize(
        image, preset.resize_size, interpolation=preset.interpolation, antialias=preset.antialias
    )
    return functional.center_crop(resized, preset.crop_size)


def _finished(preset: Any, image: Any) -> torch.Tensor:
    functional: Any = require("torchvision.transforms.functional", "torchvision made this transform", "torchvision")
    tensor = image if isinstance(image, torch.Tensor) else functional.pil_to_tensor(image)
    tensor = functional.convert_image_dtype(tensor, torch.float)
    return functional.normalize(tensor, mean=preset.mean, std=preset.std)
