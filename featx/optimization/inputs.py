"""Inputs on which errors are measured besides the example: noise, and images."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from featx.examples import Example
from featx.tree import tensors_in, tree_map

_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_SEED = 20_261_124
_INTEGERS = (torch.int32, torch.int64)
_TIMES = 16
# Sides of images are longer by a multiple of that.
_STEP = 32
OTHER_FORM = "another number of samples"
LONGER = f"{_TIMES} times as many integers"


def validation_inputs(example: Example) -> dict[str, Example]:
    """Return further inputs like the example, by what they are. Masks are those of the example.

    Noise has the mean and the deviation of the example. Integers, such as token ids, are also put into another order,
    along the last dimension, and repeated there: errors of positions grow with the length of a text. Where the inputs
    are images of three channels, there are also photos that scikit-image or scikit-learn ship, if one of these is
    installed, and else images whose spectrum falls as that of photos does.
    """
    generator = torch.Generator().manual_seed(_SEED)
    leaves = tensors_in((example.args, example.kwargs))
    found: dict[str, Example] = {}
    if any(leaf.is_floating_point() for leaf in leaves):
        found["noise"] = _mapped(example, lambda leaf: _noise(leaf, generator))
    if any(map(_are_numbers, leaves)):
        found["integers in another order"] = _mapped(example, lambda leaf: _in_another_order(leaf, generator))
        length = next(leaf.shape[-1] for leaf in leaves if _are_numbers(leaf))
        found[LONGER] = _mapped(example, lambda leaf: _repeated(leaf, length))
    if any(map(_is_image, leaves)):
        name, photos = _photos(generator)
        found[name] = _mapped(example, lambda leaf: _as_batch(photos, leaf) if _is_image(leaf) else leaf)
    return found


def other_forms(example: Example, rows: int) -> list[Example]:
    """Return inputs of another number of samples, first with images of another size too: an extractor may take both.

    What shares memory, or where it lies, may decide whether code runs: `view` may fail for two samples and not for one.

    Args:
        example: the inputs, all of which have `rows` samples.
        rows: how many.
    """
    others = 2 if rows != 2 else 3

    def of_other_rows(leaf: torch.Tensor) -> torch.Tensor:
        return torch.cat([leaf] * -(-others // rows))[:others]

    def larger(leaf: torch.Tensor) -> torch.Tensor:
        leaf = of_other_rows(leaf)
        if leaf.dim() != 4 or not leaf.is_floating_point():
            return leaf
        sizes = [side + max(_STEP, side // 2 // _STEP * _STEP) for side in leaf.shape[2:]]
        return torch.nn.functional.interpolate(leaf.float(), size=sizes, mode="bilinear").to(leaf.dtype)

    has_images = any(leaf.dim() == 4 for leaf in tensors_in((example.args, example.kwargs)))
    return [_mapped(example, function) for function in ((larger, of_other_rows) if has_images else (of_other_rows,))]


def _mapped(example: Example, function: Callable[[torch.Tensor], torch.Tensor]) -> Example:
    args, kwargs = tree_map(
        lambda leaf: function(leaf) if isinstance(leaf, torch.Tensor) else leaf, (example.args, example.kwargs)
    )
    return Example(args, kwargs, example.source, example.is_for_one_mode)


def _noise(value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if not value.is_floating_point():
        return value
    real = value.detach().float()
    deviation = real.std() if real.numel() > 1 else torch.ones((), device=value.device)
    drawn = torch.randn(value.shape, generator=generator).to(value.device)
    return (real.mean() + deviation * drawn).to(value.dtype)


def _are_numbers(value: torch.Tensor) -> bool:
    """Say whether a tensor holds integers, and is no mask."""
    return value.dtype in _INTEGERS and value.numel() > 1 and value.dim() > 0 and int(value.max()) > 1


def _in_another_order(value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if not _are_numbers(value):
        return value
    order = torch.rand(value.shape, generator=generator).argsort(-1)  # another one for each row
    return value.gather(-1, order.to(value.device))


def _repeated(value: torch.Tensor, length: int) -> torch.Tensor:
    """Return token ids, and what has as many items, repeated along the last dimension."""
    is_beside = value.dim() > 1 and value.shape[-1] == length and not value.is_floating_point()
    return value.repeat_interleave(_TIMES, -1) if is_beside else value


def _is_image(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() == 4 and value.shape[1] == 3


def _photos(generator: torch.Generator) -> tuple[str, list[torch.Tensor]]:
    """Return images of three channels, from 0 to 1, and what they are."""
    if importlib.util.find_spec("skimage") is not None:
        from skimage import data

        arrays = [data.astronaut(), data.coffee(), data.chelsea()]
        return "photos of scikit-image", [_tensor(array) for array in arrays]
    if importlib.util.find_spec("sklearn") is not None:
        from sklearn.datasets import load_sample_images

        return "photos of scikit-learn", [_tensor(array) for array in load_sample_images().images]
    return "images with the spectrum of photos", [_with_spectrum(generator) for _ in range(3)]


def _tensor(array: Any) -> torch.Tensor:
    return torch.tensor(array).permute(2, 0, 1).float() / 255


def _with_spectrum(generator: torch.Generator, size: int = 256) -> torch.Tensor:
    """Return an image whose amplitudes fall with the frequency, as those of photos do."""
    across, down = torch.fft.rfftfreq(size), torch.fft.fftfreq(size)
    amplitudes = 1 / (across[None] ** 2 + down[:, None] ** 2).sqrt().clamp(min=1 / size)
    spectrum = torch.fft.rfft2(torch.randn(3, size, size, generator=generator)) * amplitudes
    image = torch.fft.irfft2(spectrum, s=(size, size))
    low, high = image.amin((1, 2), keepdim=True), image.amax((1, 2), keepdim=True)
    return (image - low) / (high - low)


def _as_batch(photos: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """Return as many photos as `like` has images, resized and normalized as models of ImageNet take them."""
    size = like.shape[2:]
    resized = [
        torch.nn.functional.interpolate(photo[None], size=list(size), mode="bilinear", antialias=True)[0]
        for photo in photos
    ]
    chosen = torch.stack([resized[index % len(resized)].roll(index // len(resized), 2) for index in range(len(like))])
    normalized = (chosen - torch.tensor(_MEAN)[:, None, None]) / torch.tensor(_STD)[:, None, None]
    return normalized.to(like.device, like.dtype)
