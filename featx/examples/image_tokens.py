"""Images for vision-language models of transformers, which hold the place of each image in a text by tokens."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn

from featx.examples.question import UNKNOWN, Question

# Into how many tiles a model may cut an image of its own size; those that it does not need are not used.
_TILES = 8


@dataclass(frozen=True)
class ImagesInText:
    """One image for each of two texts.

    Attributes:
        inputs: the images, and what goes with them, by their names in forward.
        count: how many tokens hold the place of an image.
    """

    inputs: dict[str, Tensor]
    count: int


def images_for_text(ask: Question, image: tuple[int, int, int]) -> ImagesInText | None:
    """Return images of the shape `image`, if the number of their tokens is known.

    The number is that of the vectors which the model's `get_image_features` makes of an image. A copy of the model is
    asked, which has no values; where that needs values, one that shares the parameters of the model, in eval mode. The
    cost is then that of two images in the part of the model that sees them.
    """
    if "pixel_values" not in ask.parameters or not hasattr(ask.model, "get_image_features"):
        return None
    candidates = list(_candidates(ask, image))
    for device in ("meta", "cpu"):
        try:
            counts_on = _counter(ask.model, device)
        except UNKNOWN:  # it cannot be copied
            return None
        for inputs in candidates:
            try:
                count = counts_on(inputs)
            except Exception:  # whatever the model raises for an image that it does not take
                continue
            if count:
                return ImagesInText(inputs, count)
    return None


def _candidates(ask: Question, image: tuple[int, int, int]) -> Iterator[dict[str, Tensor]]:
    """Yield images in the forms that models take: as they are, one for each text, and cut into tiles."""
    images = ask.floats(2, *image)
    sizes = {"image_sizes": torch.tensor([image[1:]] * 2, device="cpu")} if "image_sizes" in ask.parameters else {}
    for pixels in (images, images[:, None], images[:, None].repeat(1, 1 + _TILES, 1, 1, 1)):
        for with_sizes in (sizes, {}) if sizes else ({},):
            yield {"pixel_values": pixels, **with_sizes}


def flat_images_for_text(ask: Question, patches: Tensor, grid: Tensor, merged: int) -> ImagesInText | None:
    """Return images as Qwen-VL takes them: patches of all images one after the other, and the grid of each.

    Args:
        ask: the model.
        patches: those of two images.
        grid: how many there are in time, height and width, for each image.
        merged: how many patches a side become one token.
    """
    if not {"pixel_values", "image_grid_thw"} <= ask.parameters.keys():
        return None
    return ImagesInText({"pixel_values": patches, "image_grid_thw": grid}, int(grid[0].prod()) // merged**2)


def _counter(model: nn.Module, device: str) -> Callable[[Mapping[str, Tensor]], int | None]:
    """Return what says how many vectors a copy of a model makes of each of two images."""
    twin = _copy_on(model, device)
    parameters = inspect.signature(twin.get_image_features).parameters
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())

    def count(inputs: Mapping[str, Tensor]) -> int | None:
        given = {name: value.to(device) if value.is_floating_point() else value for name, value in inputs.items()}
        with torch.no_grad(), torch.device(device):
            result = twin.get_image_features(
                **{name: value for name, value in given.items() if takes_all or name in parameters}
            )
        found = getattr(result, "pooler_output", result)
        each = found if isinstance(found, (list, tuple)) else [found]
        vectors = sum(tensor.numel() // tensor.shape[-1] for tensor in each)
        return None if vectors % 2 else vectors // 2

    return count


def _copy_on(model: nn.Module, device: str) -> Any:
    """Return a copy of a model in eval mode, without values on the meta device, and else with the same parameters."""
    memo: dict[int, Any] = {id(parameter): parameter for parameter in model.parameters()}
    if device == "meta":
        memo = {id(tensor): _on_meta(tensor) for tensor in chain(model.parameters(), model.buffers())}
    return cast("Any", copy.deepcopy(model, memo)).eval()


def _on_meta(tensor: Tensor) -> Tensor:
    twin = tensor.detach().to("meta")
    return nn.Parameter(twin, requires_grad=False) if isinstance(tensor, nn.Parameter) else twin
