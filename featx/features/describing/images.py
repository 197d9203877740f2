"""Images among the inputs of a model, and what becomes of them at another size."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from featx.errors import FeatxError
from featx.examples import Example
from featx.ir.graph import Graph
from featx.module import GraphModule
from featx.passes.shapes import ShapeProp
from featx.tree import tree_leaves, tree_map


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
        shape = next((each.shape for each in tree_leaves(value) if _is_of_places(each)), None)
        if shape is not None:
            is_image_of_list = len(shape) == 3 and isinstance(value, (tuple, list))
            sizes = tuple(map(int, shape[1:] if is_image_of_list else shape[2:]))
            batch = len(value) if is_image_of_list else int(shape[0])
            return ImageInput(name if isinstance(value, torch.Tensor) else None, sizes, batch)
    return None


def shapes_of_wider_image(
    graph: Graph, model: nn.Module, example: Example, image: ImageInput
) -> Callable[[], Mapping[str, tuple[int, ...]]]:
    """Return a function that says which shapes a graph returns, by key, for an image of twice the width.

    It runs the graph on tensors without values, the first time that it is called. It returns nothing where the graph
    does not take such an image.
    """
    found: dict[str, tuple[int, ...]] = {}
    is_done = False

    def shapes() -> Mapping[str, tuple[int, ...]]:
        nonlocal is_done
        if not is_done:
            is_done = True
            found.update(_shapes_of_wider_image(graph, model, example, image))
        return found

    return shapes


def _shapes_of_wider_image(
    graph: Graph, model: nn.Module, example: Example, image: ImageInput
) -> dict[str, tuple[int, ...]]:
    def wider(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        shape = list(value.shape)
        if _is_of_places(value) and tuple(shape[2:]) == image.sizes:
            shape[-1] *= 2
        return torch.empty(shape, dtype=value.dtype, device="meta")

    args, kwargs = tree_map(wider, (example.args, example.kwargs))
    small = Graph()
    small.output(small.graph_copy(graph, {}))
    try:
        results = ShapeProp(GraphModule(model, small)).propagate(*args, **kwargs)
    except (FeatxError, RuntimeError, ValueError, AssertionError, TypeError, IndexError):
        return {}
    return {key: tuple(value.shape) for key, value in results.items() if isinstance(value, torch.Tensor)}


def _is_of_places(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and 3 <= value.dim() <= 5
