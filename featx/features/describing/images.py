"""Images among the inputs of a model."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

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
        path: the parameter of forward and what takes the tensor out of it: `clips[0]`; empty where that is not known.
    """

    name: str | None
    sizes: tuple[int, ...]
    batch: int
    path: str = ""


def images_of(example: Example, signature: inspect.Signature) -> list[ImageInput]:
    """Return the images of an example, the first one first. A list of images without a batch counts as one."""
    by_position = [each for each in signature.parameters.values() if each.kind is not each.KEYWORD_ONLY]
    named = [
        (parameter.name if parameter.kind is not parameter.VAR_POSITIONAL else None, value)
        for parameter, value in zip(by_position, example.args, strict=False)
    ]
    found: list[ImageInput] = []
    for name, value in [*named, *example.kwargs.items()]:
        shapes = [(path, tuple(map(int, each.shape))) for path, each in _leaves(value) if is_of_places(each)]
        if shapes and len(shapes[0][1]) == 3 and isinstance(value, (tuple, list)):
            found.append(ImageInput(None, shapes[0][1][1:], len(value)))
            continue
        for path, shape in shapes:
            known = "" if name is None or path is None else f"{name}{path}"
            found.append(ImageInput(name if isinstance(value, torch.Tensor) else None, shape[2:], shape[0], known))
    return found


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str | None, Any]]:
    """Yield the leaves of an input, each with the keys that take it out; those inside an object have None."""
    if isinstance(value, (tuple, list, Mapping)):
        items = cast(Mapping[Any, Any], value).items() if isinstance(value, Mapping) else enumerate(cast(Any, value))
        for key, item in items:
            yield from _leaves(item, f"{path}[{key!r}]")
    else:
        for leaf in tree_leaves(value):
            yield (path if leaf is value else None), leaf


def is_of_places(value: Any) -> bool:
    """Say whether an input may be an image, a video or a signal."""
    return isinstance(value, torch.Tensor) and value.is_floating_point() and 3 <= value.dim() <= 5
