"""Images among the inputs of a model."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch

from featx.examples import Example
from featx.tree import tree_leaves


@dataclass(frozen=True)
class ImageInput:
    """An input of a model that is an image, a video or a signal: a tensor of three to five dimensions.

    Attributes:
        name: the parameter of forward; None where the tensor is inside a list or another container.
        sizes: the lengths of the dimensions that are places: height and width.
        batch: how many images there are.
    """

    name: str | None
    sizes: tuple[int, ...]
    batch: int


def image_of(example: Example, signature: inspect.Signature) -> ImageInput | None:
    """Return the first image of an example."""
    by_position = [each for each in signature.parameters.values() if each.kind is not each.KEYWORD_ONLY]
    named = [
        (parameter.name if parameter.kind is not parameter.VAR_POSITIONAL else None, value)
        for parameter, value in zip(by_position, example.args, strict=False)
    ]
    for name, value in [*named, *example.kwargs.items()]:
        shape = next((each.shape for each in tree_leaves(value) if is_of_places(each)), None)
        if shape is not None:
            is_image_of_list = len(shape) == 3 and isinstance(value, (tuple, list))
            sizes = tuple(map(int, shape[1:] if is_image_of_list else shape[2:]))
            batch = len(value) if is_image_of_list else int(shape[0])
            return ImageInput(name if isinstance(value, torch.Tensor) else None, sizes, batch)
    return None


def is_of_places(value: Any) -> bool:
    """Say whether an input may be an image, a video or a signal."""
    return isinstance(value, torch.Tensor) and value.is_floating_point() and 3 <= value.dim() <= 5
