"""Turn the inputs of a model into the same inputs at another batch size, or at another height and width or length."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

# Sounds have at least this many samples; below it the last dimension of a matrix is channels.
_SAMPLES = 1000
_SHORTEST = 8

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def of_one_sample(inputs: Inputs) -> Inputs:
    """Return the first sample of a batch of two. Patches of images of one size, which a grid describes, are halved."""
    if any("grid" in name for name in inputs[1]):
        return _mapped(lambda tensor: tensor[: max(len(tensor) // 2, 1)].clone(), inputs)
    return _mapped(lambda tensor: tensor[:1].clone(), inputs, of_list=lambda items: items[:1])


def of_other_sizes(inputs: Inputs) -> Iterator[Inputs]:
    """Yield inputs with everything smaller, and where there are texts with these alone shorter."""
    if "grid_thw" in inputs[1]:
        return
    yield _mapped(_smaller, inputs)
    if any(_is_text(value) for value in inputs[1].values()):
        yield _mapped(lambda tensor: _smaller(tensor) if _is_text(tensor) else tensor, inputs)


def _mapped(
    change: Callable[[torch.Tensor], torch.Tensor], value: Any, of_list: Callable[[list[Any]], list[Any]] = list
) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: _mapped(change, item, of_list) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(_mapped(change, item, of_list) for item in value)
    if isinstance(value, list):  # torchvision's detection takes a list of images, without a dimension for the batch
        return [_mapped(change if of_list is list else torch.clone, item) for item in of_list(value)]
    return value


def _is_text(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.is_floating_point() and value.dim() == 2


def _smaller(tensor: torch.Tensor) -> torch.Tensor:
    shape = list(tensor.shape)
    if _is_text(tensor):
        shape[1] = max(1, shape[1] * 3 // 4)
    elif tensor.dim() >= 4 or (tensor.dim() == 3 and shape[0] == 3):
        height, width = shape[-2:]
        shape[-2:] = _rounded(height * 5 // 7, height), _rounded(width * 6 // 7, width)
    elif tensor.dim() == 3:
        longest = 1 if shape[1] > shape[2] else 2
        shape[longest] = max(_SHORTEST, shape[longest] * 4 // 5 // _SHORTEST * _SHORTEST)
    elif tensor.dim() == 2 and shape[1] >= _SAMPLES:
        shape[1] = shape[1] * 4 // 5
    return tensor[tuple(slice(min(new, old)) for new, old in zip(shape, tensor.shape, strict=True))].clone()


def _rounded(length: int, original: int) -> int:
    """Return `length` as a multiple of what most strides divide, where `original` is one."""
    step = next(step for step in (32, 16, 8, 1) if original % step == 0 and original > step)
    return max(step, length // step * step)
